import { defineConfig } from "vitest/config";

export default defineConfig({
  base: "./", // works from any folder
  build: { target: "es2022", assetsInlineLimit: 0 },
  test: { include: ["test/**/*.test.ts"] },
});
