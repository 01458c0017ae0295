/** `flowdup serve` with the sample bundle, for all tests: a real process. */

import { spawn } from "node:child_process";
import { once } from "node:events";
import type { TestProject } from "vitest/node";

declare module "vitest" {
  export interface ProvidedContext {
    url: string;
    bundle: string; // the sample's folder
    known: string; // what tests/web/fixtures.py wrote
    shots: string; // where screenshots are kept
    result: string; // the file for what is measured
  }
}

const { env } = process;

export default async function setup(project: TestProject): Promise<() => Promise<void>> {
  const { FLOWDUP, FLOWDUP_BUNDLE, FLOWDUP_KNOWN, FLOWDUP_SHOTS, FLOWDUP_RESULT } = env;
  if (!FLOWDUP || !FLOWDUP_BUNDLE || !FLOWDUP_KNOWN || !FLOWDUP_SHOTS || !FLOWDUP_RESULT)
    throw new Error("run `make web-test`, which says where everything is");
  const [command, ...words] = FLOWDUP.split(" ");
  const server = spawn(command, [...words, "serve", FLOWDUP_BUNDLE, "--no-browser"], {
    stdio: ["ignore", "pipe", "inherit"],
  });
  const ended = once(server, "exit");
  let told = "";
  for await (const chunk of server.stdout) {
    told += String(chunk);
    if (told.includes("\n")) break;
  }
  const url = /http:\S+/.exec(told)?.[0];
  if (!url) throw new Error(`flowdup serve said '${told}'`);
  project.provide("url", url);
  project.provide("bundle", FLOWDUP_BUNDLE);
  project.provide("known", FLOWDUP_KNOWN);
  project.provide("shots", FLOWDUP_SHOTS);
  project.provide("result", FLOWDUP_RESULT);
  return async () => {
    server.kill("SIGINT");
    const [code] = (await ended) as [number | null];
    if (code !== 0) throw new Error(`flowdup serve ended with exit code ${code}`);
  };
}
