/** A point as a small picture. */

import { make } from "./dom";

export function thumbnail(points: Uint8Array, number: number, shape: number[], label = ""): HTMLCanvasElement {
  const [channels, height, width] = shape;
  const area = width * height;
  const own = points.subarray(number * channels * area, (number + 1) * channels * area);
  const about: Record<string, string> = label ? { role: "img", "aria-label": label } : { "aria-hidden": "true" };
  const canvas = make("canvas", { width: String(width), height: String(height), ...about });
  const pixels = new ImageData(width, height);
  for (let i = 0; i < area; i++) {
    for (let c = 0; c < 3; c++) pixels.data[4 * i + c] = own[(channels === 1 ? 0 : c) * area + i];
    pixels.data[4 * i + 3] = 255;
  }
  canvas.getContext("2d")!.putImageData(pixels, 0, 0);
  return canvas;
}
