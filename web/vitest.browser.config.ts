import { defineConfig } from "vitest/config";

export default defineConfig({
  test: {
    include: ["browser/**/*.test.ts"],
    globalSetup: "browser/server.ts",
    testTimeout: 60_000,
    hookTimeout: 60_000,
    fileParallelism: false, // times are measured
  },
});
