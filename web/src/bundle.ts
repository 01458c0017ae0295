/** A bundle of `flowdup export`: read, checked, and turned into a person's own model. */

import type { InferenceSession, Tensor } from "onnxruntime-web";
import { drawn, sizeOf, Subspace } from "./expansion";
import { judge, type Verdict } from "./familiarity";
import { checkFiles, type Files } from "./files";
import { type Manifest, pointSize, readManifest } from "./manifest";
import { logPrior } from "./prior";

/** What this file needs of ONNX Runtime. */
export interface Runtime {
  InferenceSession: { create: (content: Uint8Array) => Promise<InferenceSession> };
  Tensor: new (type: "uint8" | "float32", data: Points, dims: number[]) => Tensor;
}

export type Points = Uint8Array | Float32Array; // [n, *shape], row by row

/** A person's own model, and where their data lies. */
export interface Personal {
  theta: Float32Array;
  embedding: Float32Array;
  verdict: Verdict | null; // null where the bundle knows nothing of training clients
}

/** Is told when a step of the work is done. */
export type OnStep = (step: Step) => void;
export type Step = "check" | "start" | "regenerate" | "read" | "build" | "correct";

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

  /** Check all files and make both networks; an error names the file that is wrong. */
  static async load(files: Files, runtime: Runtime, onStep: OnStep = () => {}): Promise<Bundle> {
    checkFiles(files);
    const manifest = readManifest(files.get("manifest.json")!);
    onStep("check");
    const { create } = runtime.InferenceSession;
    const hypernetwork = await create(files.get("hypernetwork.onnx")!); // WebGPU starts one at a time
    const classifier = await create(files.get("classifier.onnx")!);
    onStep("start");
    const weights = new Float32Array(files.get("weights.bin")!.slice().buffer);
    const { k, d } = manifest.expansion;
    const bySeed = manifest.start === "seed";
    if (weights.length !== (bySeed ? k : k + d)) throw new Error("weights.bin has a wrong size");
    const start = bySeed ? drawn(manifest.seed, manifest.layers) : weights.slice(k);
    const subspace = new Subspace(manifest.seed, manifest.expansion, manifest.layers, start);
    const learned = manifest.method === "flowdup-plus" && !bySeed;
    const forAll = learned ? start : subspace.theta(weights.slice(0, k));
    onStep("regenerate");
    return new Bundle(manifest, runtime, hypernetwork, classifier, subspace, forAll);
  }

  /** A person's own model from unlabeled points: one pass through h, no gradient. */
  async personalize(points: Points, onStep: OnStep = () => {}): Promise<Personal> {
    const found = await this.hypernetwork.run({ x: this.tensor(points) });
    const embedding = found.r.data as Float32Array;
    onStep("read");
    const theta = this.subspace.theta(found.v.data as Float32Array);
    onStep("build");
    const own = await this.corrected(theta, points);
    onStep("correct");
    const { familiarity, inputs } = this.manifest;
    const count = points.length / pointSize(inputs);
    const verdict = familiarity ? judge(familiarity, embedding, count) : null;
    return { theta: own, embedding, verdict };
  }

  /** The model for everyone, calibrated: what a person gets whose data look like nobody's. */
  globalModel(): Float32Array {
    return this.calibrated(this.forAll.slice());
  }

  /** [n, classes], row by row. */
  async logits(points: Points, theta: Float32Array): Promise<Float32Array> {
    const [size, { classes }] = [pointSize(this.manifest.inputs), this.manifest.inputs];
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
    const { inputs } = this.manifest;
    const dims = [points.length / pointSize(inputs), ...inputs.shape];
    return new this.runtime.Tensor(inputs.dtype, points, dims);
  }

  /** For class shares, where the federation does so: `src/flowdup/methods/corrected.py`. */
  private async corrected(theta: Float32Array, points: Points): Promise<Float32Array> {
    const correction = this.manifest.correction;
    if (!correction) return theta;
    const { move, sparsity, strength, typical } = correction.numbers as Record<string, number>;
    const profile = correction.numbers.profile as number[] | undefined;
    if (move !== undefined)
      theta = theta.map((own, i) => this.forAll[i] + move * (own - this.forAll[i]));
    theta = this.calibrated(theta);
    const logits = await this.logits(points, theta);
    const { classes } = this.manifest.inputs;
    const { steps } = correction;
    const shift = logPrior(logits, classes, steps, sparsity ?? 0, strength ?? 1, typical, profile);
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
