/** A bundle of `flowdup export`: read, checked, and turned into a person's own model. */

import { sha256 } from "@noble/hashes/sha2";
import { bytesToHex } from "@noble/hashes/utils";
import type { InferenceSession, Tensor } from "onnxruntime-web";
import { drawn, type ExpansionSpec, type Layer, sizeOf, Subspace } from "./expansion";
import { logPrior } from "./prior";

export interface Manifest {
  format: number;
  method: string;
  model: string;
  round: number;
  seed: number;
  inputs: { shape: number[]; dtype: "uint8" | "float32"; classes: number; class_names: string[] };
  embedding: number;
  expansion: ExpansionSpec;
  start: string; // "seed", or the file that has it
  layers: Layer[];
  correction: {
    steps: number;
    last_layer: { weight: string; bias: string };
    numbers: Record<string, number | number[]>;
  } | null;
}

/** What this file needs of ONNX Runtime. */
export interface Runtime {
  InferenceSession: { create(content: Uint8Array): Promise<InferenceSession> };
  Tensor: new (type: "uint8" | "float32", data: Points, dims: number[]) => Tensor;
}

export type Points = Uint8Array | Float32Array; // [n, *shape], row by row

/** The two models of a person, and where their data lies. */
export interface Personal {
  theta: Float32Array;
  embedding: Float32Array;
}

const FORMAT = 1;
const FILES = ["hypernetwork.onnx", "classifier.onnx", "weights.bin", "manifest.json"];
const CHUNK = 512; // points that are classified at once

export class Bundle {
  private constructor(
    readonly manifest: Manifest,
    private readonly runtime: Runtime,
    private readonly hypernetwork: InferenceSession,
    private readonly classifier: InferenceSession,
    private readonly subspace: Subspace,
    readonly forAll: Float32Array, // theta of the model for everyone, not calibrated
  ) {}

  /** Read and check all files; an error names the one that is wrong. */
  static async load(
    fetchFile: (name: string) => Promise<Uint8Array>,
    runtime: Runtime,
  ): Promise<Bundle> {
    const [h, f, stored, about] = await fetchChecked(fetchFile);
    const manifest = readManifest(about);
    const weights = new Float32Array(stored.slice().buffer);
    const { k, d } = manifest.expansion;
    const bySeed = manifest.start === "seed";
    if (weights.length !== (bySeed ? k : k + d)) throw new Error("weights.bin has a wrong size");
    const start = bySeed ? drawn(manifest.seed, manifest.layers) : weights.slice(k);
    const subspace = new Subspace(manifest.seed, manifest.expansion, manifest.layers, start);
    const learned = manifest.method === "flowdup-plus" && !bySeed;
    const forAll = learned ? start : subspace.theta(weights.slice(0, k));
    const sessions = await Promise.all([h, f].map((c) => runtime.InferenceSession.create(c)));
    return new Bundle(manifest, runtime, sessions[0], sessions[1], subspace, forAll);
  }

  get classNames(): string[] {
    const { class_names, classes } = this.manifest.inputs;
    return class_names.length ? class_names : Array.from({ length: classes }, (_, c) => String(c));
  }

  /** How many numbers a point has. */
  get pointSize(): number {
    return this.manifest.inputs.shape.reduce((a, b) => a * b, 1);
  }

  /** A person's own model from unlabeled points: one pass through h, no gradient. */
  async personalize(points: Points): Promise<Personal> {
    const found = await this.hypernetwork.run({ x: this.tensor(points) });
    const theta = this.subspace.theta(found.v.data as Float32Array);
    return {
      theta: await this.corrected(theta, points),
      embedding: found.r.data as Float32Array,
    };
  }

  /** The model for everyone, calibrated: what a person gets whose data look like nobody's. */
  globalModel(): Float32Array {
    return this.calibrated(this.forAll.slice());
  }

  /** [n, classes], row by row. */
  async logits(points: Points, theta: Float32Array): Promise<Float32Array> {
    const [size, { classes }] = [this.pointSize, this.manifest.inputs];
    const weights = new this.runtime.Tensor("float32", theta, [theta.length]);
    const out = new Float32Array((points.length / size) * classes);
    for (let at = 0; at * size < points.length; at += CHUNK) {
      const chunk = points.slice(at * size, (at + CHUNK) * size);
      const found = await this.classifier.run({ x: this.tensor(chunk), theta: weights });
      out.set(found.logits.data as Float32Array, at * classes);
    }
    return out;
  }

  private tensor(points: Points): Tensor {
    const { dtype, shape } = this.manifest.inputs;
    return new this.runtime.Tensor(dtype, points, [points.length / this.pointSize, ...shape]);
  }

  /** For class shares, where the federation does so: `src/flowdup/methods/corrected.py`. */
  private async corrected(theta: Float32Array, points: Points): Promise<Float32Array> {
    const correction = this.manifest.correction;
    if (!correction) return theta;
    const { move, sparsity, strength } = correction.numbers as Record<string, number>;
    if (move !== undefined)
      theta = theta.map((own, i) => this.forAll[i] + move * (own - this.forAll[i]));
    theta = this.calibrated(theta);
    const logits = await this.logits(points, theta);
    const { classes } = this.manifest.inputs;
    const shift = logPrior(logits, classes, correction.steps, sparsity ?? 0, strength ?? 1);
    const [first] = this.place(correction.last_layer.bias);
    shift.forEach((value, c) => (theta[first + c] += value));
    return theta;
  }

  private calibrated(theta: Float32Array): Float32Array {
    const correction = this.manifest.correction;
    const scale = correction?.numbers.scale as number | undefined;
    if (!correction || scale === undefined) return theta;
    const bias = correction.numbers.bias as number[];
    for (const name of [correction.last_layer.weight, correction.last_layer.bias]) {
      const [first, end] = this.place(name);
      for (let i = first; i < end; i++) theta[i] *= scale;
    }
    const [first] = this.place(correction.last_layer.bias);
    bias.forEach((value, c) => (theta[first + c] += value));
    return theta;
  }

  /** Where a layer begins and ends in theta. */
  private place(name: string): [number, number] {
    let at = 0;
    for (const layer of this.manifest.layers) {
      const end = at + sizeOf(layer);
      if (layer.name === name) return [at, end];
      at = end;
    }
    throw new Error(`manifest.json names a layer '${name}' that theta has not`);
  }
}

function readManifest(content: Uint8Array): Manifest {
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

/** All files, in the order of SHA256SUMS, whose every line must be right. */
async function fetchChecked(
  fetchFile: (name: string) => Promise<Uint8Array>,
): Promise<Uint8Array[]> {
  const [sums, ...contents] = await Promise.all(["SHA256SUMS", ...FILES].map(fetchFile));
  const lines = new TextDecoder().decode(sums).split("\n");
  FILES.forEach((name, i) => {
    if (lines[i] !== `${bytesToHex(sha256(contents[i]))}  ${name}`)
      throw new Error(`${name} is not what SHA256SUMS says: get the bundle again`);
  });
  if (lines.length !== FILES.length + 1 || lines[FILES.length])
    throw new Error("SHA256SUMS has other lines than those of the bundle: get the bundle again");
  return contents;
}

/** The class of each point and its probability, from logits [n, classes]. */
export function decide(logits: Float32Array, classes: number): { class: number; p: number }[] {
  const out = [];
  for (let row = 0; row < logits.length; row += classes) {
    const own = logits.subarray(row, row + classes);
    const best = own.reduce((most, value, c) => (value > own[most] ? c : most), 0);
    const total = own.reduce((sum, value) => sum + Math.exp(value - own[best]), 0);
    out.push({ class: best, p: 1 / total });
  }
  return out;
}
