import { defineConfig } from "vitest/config";

export default defineConfig({
  base: "./", // works from any folder
  build: {
    target: "es2022",
    assetsInlineLimit: 0,
    modulePreload: { polyfill: false },
    outDir: "../src/flowdup/page", // inside the Python package, not committed
    emptyOutDir: true,
  },
  worker: { format: "es" },
  test: { include: ["test/**/*.test.ts"] },
});
