/** Counter-based random numbers, bit for bit those of `src/flowdup/random.py` (Philox 4x32-10). */

import { sha256 } from "@noble/hashes/sha2";

type Name = string | number;

/** A named, endless sequence of random words; its key is a function of seed and name alone. */
export class Stream {
  readonly key: readonly [number, number];

  constructor(
    readonly seed: number,
    readonly path: readonly Name[] = [],
  ) {
    const digest = new DataView(sha256(new TextEncoder().encode(asJson([seed, ...path]))).buffer);
    this.key = [digest.getUint32(0, true), digest.getUint32(4, true)];
  }

  /** The stream of a longer name. */
  child(...names: Name[]): Stream {
    return new Stream(this.seed, [...this.path, ...names]);
  }

  /** The first n words. */
  words(n: number): Uint32Array {
    const blocks = Math.ceil(n / 4);
    const out = new Uint32Array(4 * blocks);
    for (let block = 0; block < blocks; block++) philox(block, this.key, out, 4 * block);
    return out.subarray(0, n);
  }

  /** -1 or +1: bit i mod 32 (least significant first) of word i div 32, zero meaning -1. */
  signs(n: number): Float32Array {
    const words = this.words(Math.ceil(n / 32));
    const out = new Float32Array(n);
    for (let i = 0; i < n; i++) out[i] = (words[i >>> 5] >>> (i & 31)) & 1 ? 1 : -1;
    return out;
  }

  /** Uniform on (-1, 1), exact in float32. */
  uniform(n: number): Float32Array {
    const words = this.words(n);
    const out = new Float32Array(n);
    for (let i = 0; i < n; i++) out[i] = (2 * (words[i] >>> 9) + 1 - 2 ** 23) * 2 ** -23;
    return out;
  }

  /** 0 .. n-1 in random order: the stable sorting order of n words. */
  permutation(n: number): Uint32Array {
    return sortingOrder(this.words(n));
  }
}

/** Words 0 to 3 of a block: Philox at the counter (block, block / 2^32, 0, 0). */
function philox(
  block: number,
  key: readonly [number, number],
  out: Uint32Array,
  at: number,
): void {
  let [c0, c1, c2, c3] = [block >>> 0, Math.floor(block / 2 ** 32), 0, 0];
  let [k0, k1] = key;
  for (let round = 0; round < 10; round++) {
    const high0 = highWord(c0, 0xd2511f53);
    const low0 = Math.imul(c0, 0xd2511f53);
    const high1 = highWord(c2, 0xcd9e8d57);
    const low1 = Math.imul(c2, 0xcd9e8d57);
    c0 = high1 ^ c1 ^ k0;
    c1 = low1;
    c2 = high0 ^ c3 ^ k1;
    c3 = low0;
    k0 = (k0 + 0x9e3779b9) >>> 0;
    k1 = (k1 + 0xbb67ae85) >>> 0;
  }
  out[at] = c0;
  out[at + 1] = c1;
  out[at + 2] = c2;
  out[at + 3] = c3;
}

/** The upper 32 bits of the product of two words. */
function highWord(a: number, b: number): number {
  const [aHigh, aLow, bHigh, bLow] = [a >>> 16, a & 0xffff, b >>> 16, b & 0xffff];
  const middle = aHigh * bLow + ((aLow * bLow) >>> 16);
  const carry = (middle % 65536) + aLow * bHigh;
  return aHigh * bHigh + Math.floor(middle / 65536) + Math.floor(carry / 65536);
}

/** The places of the words in ascending order, equal ones as they stood: radix sort. */
export function sortingOrder(words: Uint32Array): Uint32Array {
  let order = Uint32Array.from(words.keys());
  for (const shift of [0, 11, 22]) {
    const places = new Uint32Array(2 ** 11 + 1);
    for (const word of words) places[((word >>> shift) & 2047) + 1]++;
    for (let i = 0; i < 2 ** 11; i++) places[i + 1] += places[i];
    const next = new Uint32Array(words.length);
    for (const i of order) next[places[(words[i] >>> shift) & 2047]++] = i;
    order = next;
  }
  return order;
}

/** As Python writes it: without spaces, everything beyond ASCII escaped. */
function asJson(value: Name[]): string {
  return JSON.stringify(value).replace(
    /[\u007f-\uffff]/g,
    (c) => `\\u${c.charCodeAt(0).toString(16).padStart(4, "0")}`,
  );
}
