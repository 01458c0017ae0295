/** A person's image files as points; what cannot be read is named, and the rest goes on. */

import type { Inputs } from "./manifest";
import { pointSize } from "./manifest";
import { type Picture, toPoint } from "./pixels";

export const MOST = 10_000; // images of one person
const AT_ONCE = 4; // files that are decoded side by side: a photo takes 50 MB then

export interface Read {
  points: Uint8Array; // [n, *shape]
  notes: string[]; // for the person, a sentence each
}

export async function readImages(
  files: Iterable<File>,
  inputs: Inputs,
  onProgress: (done: number, all: number) => void = () => {},
): Promise<Read> {
  const all = [...files];
  const taken = all.slice(0, MOST);
  const size = pointSize(inputs);
  const points = new Uint8Array(taken.length * size);
  const [unread, scaled]: [string[], string[]] = [[], []];
  let count = 0;
  for (let first = 0; first < taken.length; first += AT_ONCE) {
    onProgress(first, taken.length);
    const group = taken.slice(first, first + AT_ONCE);
    const pictures = await Promise.all(group.map((file) => decode(file, inputs)));
    for (const [i, picture] of pictures.entries()) {
      if (!picture) {
        unread.push(group[i].name);
        continue;
      }
      if (picture.scaled) scaled.push(group[i].name);
      points.set(toPoint(picture, inputs.shape), count++ * size);
    }
  }
  const notes = [];
  const [, height, width] = inputs.shape;
  if (unread.length) notes.push(`${listed(unread)} could not be read as an image and was left out.`);
  if (scaled.length)
    notes.push(`${listed(scaled)} had another size: the middle was scaled to ${width} × ${height}.`);
  if (taken.length < all.length) notes.push(`Only the first ${MOST} images are used.`);
  return { points: points.slice(0, count * size), notes };
}

/** null if the browser cannot read it. */
async function decode(file: File, inputs: Inputs): Promise<(Picture & { scaled: boolean }) | null> {
  let bitmap: ImageBitmap | null = null;
  try {
    bitmap = await createImageBitmap(file, { premultiplyAlpha: "none", colorSpaceConversion: "none" });
    return shrunk(bitmap, inputs);
  } catch {
    return null;
  } finally {
    bitmap?.close();
  }
}

function shrunk(bitmap: ImageBitmap, { shape: [, height, width] }: Inputs): Picture & { scaled: boolean } {
  const most = 8 * Math.max(width, height); // what is larger, the browser shrinks first
  const shrink = Math.min(1, most / Math.min(bitmap.width, bitmap.height));
  const [w, h] = [bitmap.width, bitmap.height].map((side) => Math.max(1, Math.round(side * shrink)));
  const context = canvasOf(w, h);
  context.fillRect(0, 0, w, h); // what is transparent is black
  context.imageSmoothingQuality = "high";
  context.drawImage(bitmap, 0, 0, w, h);
  const scaled = bitmap.width !== width || bitmap.height !== height;
  const picture = pictureOf(context, w, h);
  if (picture.data[3] !== 255) throw new Error("too large for a canvas, which stays empty then");
  return { ...picture, scaled };
}

let canvas: OffscreenCanvas | null = null; // one for all images of a size

function canvasOf(width: number, height: number): OffscreenCanvasRenderingContext2D {
  if (canvas?.width !== width || canvas.height !== height) canvas = new OffscreenCanvas(width, height);
  return canvas.getContext("2d", { willReadFrequently: true })!;
}

export function pictureOf(
  context: CanvasRenderingContext2D | OffscreenCanvasRenderingContext2D,
  width: number,
  height: number,
): Picture {
  return { width, height, data: context.getImageData(0, 0, width, height).data };
}

/** The first names, and how many more there are. */
function listed(names: string[]): string {
  const shown = names.slice(0, 3).join(", ");
  return names.length > 3 ? `${shown} and ${names.length - 3} more` : shown;
}
