/** Sample clients of a bundle: `src/flowdup/export/samples.py` writes them. */

import type { Files } from "./files";
import { type Inputs, pointSize } from "./manifest";

export interface Sample {
  name: string;
  points: Uint8Array; // [n, *shape]
  labels: number[]; // -1: unknown
  traits: Record<string, string | number>;
}

interface Listed {
  clients: { name: string; points: number; labels: number[]; traits: Sample["traits"] }[];
}

/** Of files that are checked; none where points are no bytes. */
export function readSamples(files: Files, inputs: Inputs): Sample[] {
  const [points, about] = [files.get("samples.bin"), files.get("samples.json")];
  if (!points || !about || inputs.dtype !== "uint8") return [];
  const size = pointSize(inputs);
  let at = 0;
  return listed(about).map((client) => ({
    ...client,
    points: points.slice(at * size, (at += client.points) * size),
  }));
}

function listed(content: Uint8Array): Listed["clients"] {
  try {
    return (JSON.parse(new TextDecoder().decode(content)) as Listed).clients;
  } catch {
    throw new Error("samples.json is damaged: get the bundle again");
  }
}
