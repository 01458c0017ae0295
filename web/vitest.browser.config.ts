import { defineConfig } from "vitest/config";

export default defineConfig({
  test: {
    include: ["browser/**/*.test.ts"],
    globalSetup: "browser/server.ts",
    testTimeout: 120_000 /* on a busy machine */,
    hookTimeout: 60_000,
    fileParallelism: false, // times are measured
  },
});
