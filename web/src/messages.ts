/** What passes between the page and its worker. */

import type { Step } from "./bundle";
import type { Verdict } from "./familiarity";
import type { Files } from "./files";
import type { Manifest } from "./manifest";
import type { Sample } from "./samples";

export interface Timed {
  step: Step | "warm" | "own" | "everyone";
  ms: number;
}

export type Request =
  | { kind: "start"; wasm: Uint8Array } // ONNX Runtime's program
  | { kind: "open"; files: Files }
  | { kind: "personalize"; points: Uint8Array };

export interface Opened {
  manifest: Manifest;
  samples: Sample[];
  times: Timed[];
}

export interface Answers {
  own: Float32Array; // logits [n, classes] of the person's own model
  everyone: Float32Array; // and of the model for everyone
  verdict: Verdict | null;
  times: Timed[];
}

export type Reply<T> = { id: number; value: T } | { id: number; error: string };
