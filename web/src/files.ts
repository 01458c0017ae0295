/** The files of a bundle: which there are, fetched, and held to their SHA-256. */

import { sha256 } from "@noble/hashes/sha2";
import { bytesToHex } from "@noble/hashes/utils";

export type Files = Map<string, Uint8Array>; // by name
export type FetchFile = (name: string) => Promise<Uint8Array>;

export const SUMS = "SHA256SUMS";
const NEEDED = ["hypernetwork.onnx", "classifier.onnx", "weights.bin", "manifest.json"];
const SAMPLES = ["samples.bin", "samples.json"];

/** All files that a bundle has; not yet checked. */
export async function fetchBundle(fetchFile: FetchFile): Promise<Files> {
  const sums = await fetchFile(SUMS);
  const names = [...readSums(sums).keys()];
  const contents = await Promise.all(names.map(fetchFile));
  return new Map([[SUMS, sums], ...names.map((name, i) => [name, contents[i]] as const)]);
}

/** An error names the file that is missing or not what SHA256SUMS says. */
export function checkFiles(files: Files): void {
  for (const [name, digest] of readSums(files.get(SUMS))) {
    const content = files.get(name);
    if (!content) throw new Error(`the bundle has no ${name}: get it again`);
    if (bytesToHex(sha256(content)) !== digest)
      throw new Error(`${name} is not what SHA256SUMS says: get the bundle again`);
  }
}

/** SHA-256 by name: of the four files that every bundle has, and perhaps of samples. */
function readSums(content?: Uint8Array): Map<string, string> {
  if (!content) throw new Error(`the bundle has no ${SUMS}: get it again`);
  const lines = new TextDecoder().decode(content).split("\n");
  const found = new Map(lines.slice(0, -1).map((line) => [line.slice(66), line.slice(0, 64)]));
  const names = found.has(SAMPLES[0]) ? [...NEEDED, ...SAMPLES] : NEEDED;
  const whole = lines.slice(0, -1).every((line) => /^[0-9a-f]{64} {2}\S+$/.test(line));
  if (!whole || lines.at(-1) !== "" || lines.length !== names.length + 1 || !names.every((name) => found.has(name)))
    throw new Error(`${SUMS} has other lines than those of a bundle: get the bundle again`);
  return found;
}
