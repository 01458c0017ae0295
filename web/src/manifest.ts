/** What `manifest.json` of a bundle says: `src/flowdup/export/bundle.py` writes it. */

import type { ExpansionSpec, Layer } from "./expansion";
import type { Familiarity } from "./familiarity";

export interface Inputs {
  shape: number[];
  dtype: "uint8" | "float32";
  classes: number;
  class_names: string[];
}

export interface Manifest {
  format: number;
  method: string;
  model: string;
  round: number;
  seed: number;
  inputs: Inputs;
  embedding: number;
  expansion: ExpansionSpec;
  start: string; // "seed", or the file that has it
  layers: Layer[];
  correction: {
    steps: number;
    last_layer: { weight: string; bias: string };
    numbers: Record<string, number | number[]>;
  } | null;
  familiarity?: Familiarity | null;
}

const FORMAT = 1;

export function readManifest(content: Uint8Array): Manifest {
  let found: Manifest;
  try {
    found = JSON.parse(new TextDecoder("utf-8", { fatal: true }).decode(content)) as Manifest;
  } catch {
    throw new Error("manifest.json is damaged: get the bundle again");
  }
  if (found?.format !== FORMAT)
    throw new Error(`manifest.json has format ${found?.format}, this page reads ${FORMAT}`);
  return found;
}

/** Refuse a model for which the page can make no points: it has images of bytes, gray or coloured. */
export function checkImages({ shape, dtype }: Inputs): void {
  if (dtype !== "uint8" || shape.length !== 3 || (shape[0] !== 1 && shape[0] !== 3))
    throw new Error(`it reads inputs of shape ${shape.join(" × ")} and type ${dtype}, and this page has images`);
}

/** Names of the classes, or their numbers. */
export function classNames({ class_names, classes }: Inputs): string[] {
  return class_names.length ? class_names : Array.from({ length: classes }, (_, c) => String(c));
}

/** How many numbers a point has. */
export const pointSize = (inputs: Inputs): number => inputs.shape.reduce((a, b) => a * b, 1);
