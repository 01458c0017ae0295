/** theta = start + S P v, with P from the seed: `src/flowdup/subspace.py` in TypeScript. */

import { sha256 } from "@noble/hashes/sha2";
import { bytesToHex } from "@noble/hashes/utils";
import { Stream } from "./random";

/** A layer of theta, as the manifest has it. */
export interface Layer {
  name: string;
  shape: number[];
  scale: number;
  bound?: number; // of the uniform draw that it begins with
  constant?: number; // or what all of it begins with
}

export interface ExpansionSpec {
  kind: string;
  k: number;
  d: number;
  sha256: string;
}

export const sizeOf = (layer: Layer): number => layer.shape.reduce((a, b) => a * b, 1);

/** theta_0 as the seed gives it. */
export function drawn(seed: number, layers: Layer[]): Float32Array {
  const out = new Float32Array(layers.reduce((sum, layer) => sum + sizeOf(layer), 0));
  let at = 0;
  for (const layer of layers) {
    const size = sizeOf(layer);
    if (layer.bound === undefined) {
      out.fill(layer.constant ?? 0, at, at + size);
    } else {
      const draw = new Stream(seed, ["theta_0", layer.name]).uniform(size);
      for (let i = 0; i < size; i++) out[at + i] = draw[i] * layer.bound;
    }
    at += size;
  }
  return out;
}

/** P: v to the move of every weight, before rows are scaled. */
interface Expansion {
  tensors: (Int32Array | Float32Array)[];
  apply(v: Float32Array): Float32Array;
}

/** Each weight belongs to one coordinate, with a random sign. */
function hashed(stream: Stream, scales: Float32Array, k: number): Expansion {
  const d = scales.length;
  const pi = stream.child("coordinate").permutation(d);
  const coordinate = Int32Array.from(pi, (place) => place % k);
  const energy = new Float64Array(k);
  for (let i = 0; i < d; i++) energy[coordinate[i]] += scales[i] * scales[i];
  const norm = Float32Array.from(energy, Math.sqrt);
  const sign = stream.child("sign").signs(d);
  const apply = (v: Float32Array): Float32Array => {
    const own = v.map((value, i) => value / norm[i]);
    return sign.map((s, i) => s * own[coordinate[i]]);
  };
  return { tensors: [coordinate, sign, norm], apply };
}

/** P = (A (x) B) / sqrt(d), cut to d rows and k columns: two matrix products. */
function kronecker(stream: Stream, scales: Float32Array, k: number): Expansion {
  const d = scales.length;
  const [a, b] = grid(d, 8);
  const [m, n] = grid(k, 1);
  const left = stream.child("left").signs(a * m); // [a, m]
  const right = stream.child("right").signs(b * n); // [b, n]
  const apply = (v: Float32Array): Float32Array => {
    const inner = new Float32Array(m * b); // V B^T / sqrt(d)
    for (let i = 0; i < m; i++)
      for (let j = 0; j < b; j++) {
        let sum = 0;
        for (let c = 0; c < n && i * n + c < k; c++) sum += v[i * n + c] * right[j * n + c];
        inner[i * b + j] = sum / Math.sqrt(d);
      }
    const out = new Float32Array(d);
    for (let i = 0; i < d; i++) {
      const [row, column] = [Math.floor(i / b), i % b];
      let sum = 0;
      for (let c = 0; c < m; c++) sum += left[row * m + c] * inner[c * b + column];
      out[i] = sum;
    }
    return out;
  };
  return { tensors: [left, right], apply };
}

/** A nearly square grid of at least so many cells. */
function grid(size: number, multiple: number): [number, number] {
  const columns = Math.ceil(Math.ceil(Math.sqrt(size)) / multiple) * multiple;
  return [Math.ceil(size / columns), columns];
}

const KINDS: Record<string, typeof hashed> = { hashed, kronecker };

/** All models near a start: `theta(v)`. */
export class Subspace {
  private readonly expansion: Expansion;
  private readonly scales: Float32Array;

  constructor(
    seed: number,
    spec: ExpansionSpec,
    layers: Layer[],
    readonly start: Float32Array,
  ) {
    const make = KINDS[spec.kind];
    if (!make) throw new Error(`this page does not know expansions of the kind '${spec.kind}'`);
    this.scales = new Float32Array(spec.d);
    let at = 0;
    for (const layer of layers) this.scales.fill(layer.scale, at, (at += sizeOf(layer)));
    this.expansion = make(new Stream(seed, ["expansion"]), this.scales, spec.k);
    if (digest(this.expansion.tensors) !== spec.sha256)
      throw new Error("the seed gives another expansion here than where the bundle was made");
  }

  theta(v: Float32Array): Float32Array {
    const moves = this.expansion.apply(v);
    return this.start.map((own, i) => own + this.scales[i] * moves[i]);
  }
}

/** SHA-256 of the arrays' bytes, one after the other (little-endian, as all browsers are). */
function digest(arrays: (Int32Array | Float32Array)[]): string {
  const found = sha256.create();
  for (const array of arrays) found.update(new Uint8Array(array.buffer));
  return bytesToHex(found.digest());
}
