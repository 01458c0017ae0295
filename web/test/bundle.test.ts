/** Bundles that Python has made, with what it makes of some points; `make web-test` writes them. */

import { readdirSync, readFileSync } from "node:fs";
import { join } from "node:path";
import * as ort from "onnxruntime-web";
import { describe, expect, test } from "vitest";
import { Bundle, decide, type Points, type Runtime } from "../src/bundle";
import { fetchBundle } from "../src/files";

const folder = process.env.FLOWDUP_BUNDLES;
if (!folder) throw new Error("no bundles: run `make web-test`, which exports some");

interface Known {
  points: number;
  dtype: "uint8" | "float32";
  personal: number[];
  for_all: number[];
  embedding: number[];
  familiarity: { score: number; threshold: number; foreign: boolean } | null;
}

const runtime = ort as unknown as Runtime;
const reader = (name: string) => async (file: string) =>
  new Uint8Array(readFileSync(join(folder, name, file)));

function readPoints(name: string, known: Known, number: number): Points {
  const { buffer } = new Uint8Array(readFileSync(join(folder!, name, `points-${number}.bin`)));
  return known.dtype === "uint8" ? new Uint8Array(buffer) : new Float32Array(buffer);
}

const distance = (a: ArrayLike<number>, b: number[]): number =>
  b.reduce((most, value, i) => Math.max(most, Math.abs(a[i] - value)), a.length === b.length ? 0 : NaN);

describe.each(readdirSync(folder))("the bundle %s", (name) => {
  const known = JSON.parse(readFileSync(join(folder, name, "known.json"), "utf8")) as Known[];

  test("makes the models that Python makes, from sets of any size", async () => {
    const bundle = await Bundle.load(await fetchBundle(reader(name)), runtime);
    for (const [number, answer] of known.entries()) {
      const points = readPoints(name, answer, number);
      const own = await bundle.personalize(points);
      expect(distance(own.embedding, answer.embedding)).toBeLessThan(1e-4);
      expect(own.verdict === null).toBe(answer.familiarity === null);
      if (own.verdict && answer.familiarity) {
        expect(own.verdict.score / answer.familiarity.score).toBeCloseTo(1, 3);
        expect(own.verdict.limit / answer.familiarity.threshold).toBeCloseTo(1, 9);
        expect(own.verdict.foreign).toBe(answer.familiarity.foreign);
      }
      const logits = await bundle.logits(points, own.theta);
      expect(distance(logits, answer.personal)).toBeLessThan(1e-3);
      const forAll = await bundle.logits(points, bundle.globalModel());
      expect(distance(forAll, answer.for_all)).toBeLessThan(1e-3);
      const decided = decide(logits, bundle.manifest.inputs.classes);
      expect(decided).toHaveLength(answer.points);
      expect(decided.every(({ p }) => p > 0 && p <= 1)).toBe(true);
    }
  });

  const files = ["hypernetwork.onnx", "classifier.onnx", "weights.bin", "manifest.json"];
  test.each([...files, "SHA256SUMS"])("with a flipped byte in %s is refused by name", async (file) => {
    for (const part of [0, 0.5, 1]) {
      const read = async (each: string) => {
        const content = await reader(name)(each);
        if (each === file) content[Math.floor(part * (content.length - 1))] ^= 1;
        return content;
      };
      const load = async () => Bundle.load(await fetchBundle(read), runtime);
      await expect(load()).rejects.toThrow(file);
    }
  });
});
