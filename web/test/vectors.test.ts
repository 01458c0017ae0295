import { createHash } from "node:crypto";
import { describe, expect, test } from "vitest";
import { drawn, Subspace } from "../src/expansion";
import { Stream } from "../src/random";
import vectors from "./vectors.json";

const sha256 = (array: Uint32Array | Float32Array): string =>
  createHash("sha256").update(new Uint8Array(array.buffer)).digest("hex");

describe.each(vectors.streams)("the stream $path", (known) => {
  const [seed, ...path] = known.path as [number, ...(string | number)[]];
  const stream = new Stream(seed, path);

  test("has Python's words", () => {
    expect([...stream.words(9)]).toEqual(known.words);
    expect([...stream.signs(40)]).toEqual(known.signs);
    expect([...stream.uniform(5)]).toEqual(known.uniform);
    expect([...stream.permutation(12)]).toEqual(known.permutation);
    expect(sha256(stream.permutation(100_000))).toBe(known.long_permutation_sha256);
  });
});

describe.each(vectors.expansions)("the expansion $spec.kind of cnn", (known) => {
  const start = drawn(known.seed, known.layers);

  test("has Python's bits, and moves weights as there", () => {
    expect(sha256(start)).toBe(known.theta_0_sha256);
    const { k, d } = known.spec;
    const subspace = new Subspace(known.seed, known.spec, known.layers, start); // checks its SHA-256
    const theta = subspace.theta(Float32Array.from({ length: k }, (_, i) => (2 * i) / (k - 1) - 1));
    const every = Math.floor(d / 50);
    known.theta_of_linspace.forEach((value, i) => {
      expect(Math.abs(theta[i * every] - value)).toBeLessThan(1e-6);
    });
  });

  test("is refused if its bits are others", () => {
    const other = { ...known.spec, sha256: known.theta_0_sha256 };
    expect(() => new Subspace(known.seed, other, known.layers, start)).toThrow("another expansion");
  });
});
