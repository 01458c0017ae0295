/** Pixels of any size as the points that a model reads: averaged, cut, gray or coloured. */

/** RGBA, row by row, as a canvas has it. */
export interface Picture {
  width: number;
  height: number;
  data: Uint8ClampedArray | Uint8Array;
}

interface Part {
  left: number;
  top: number;
  width: number;
  height: number;
}

const MARGIN = 0.06; // around what was drawn, as a share of its longer side

/** [channels, height, width] of the middle of a picture, which is scaled where it has to be. */
export function toPoint(picture: Picture, shape: number[]): Uint8Array {
  const [channels, height, width] = shape;
  const scale = Math.min(picture.width / width, picture.height / height);
  const [w, h] = [width * scale, height * scale];
  const middle = { left: (picture.width - w) / 2, top: (picture.height - h) / 2, width: w, height: h };
  return partToPoint(picture, middle, [channels, height, width]);
}

/** The same of what was drawn, light on black, wherever on the pad it is; null if nothing was. */
export function drawingToPoint(picture: Picture, shape: number[]): Uint8Array | null {
  let [left, top, right, bottom] = [picture.width, picture.height, -1, -1];
  for (let y = 0; y < picture.height; y++)
    for (let x = 0; x < picture.width; x++)
      if (picture.data[4 * (y * picture.width + x)] > 127) {
        [left, right] = [Math.min(left, x), Math.max(right, x)];
        [top, bottom] = [Math.min(top, y), Math.max(bottom, y)];
      }
  if (right < 0) return null;
  const [channels, height, width] = shape;
  const [w, h] = [right - left + 1, bottom - top + 1];
  const scale = Math.max(w / width, h / height) * (1 + 2 * MARGIN);
  const part = { width: width * scale, height: height * scale };
  const place = { left: left + (w - part.width) / 2, top: top + (h - part.height) / 2 };
  return partToPoint(picture, { ...place, ...part }, [channels, height, width]);
}

/** Light where it was dark. */
export const inverted = (points: Uint8Array): Uint8Array => points.map((value) => 255 - value);

function partToPoint(picture: Picture, part: Part, [channels, height, width]: number[]): Uint8Array {
  const small = averaged(picture, part, width, height);
  const area = width * height;
  const out = new Uint8Array(channels * area);
  for (let i = 0; i < area; i++) {
    const [r, g, b] = small.subarray(4 * i, 4 * i + 3);
    if (channels === 1) out[i] = gray(r, g, b);
    else [r, g, b].forEach((value, c) => (out[c * area + i] = value));
  }
  return out;
}

/** As Pillow's `convert("L")`, so that a file gives the bytes that it gives in Python. */
const gray = (r: number, g: number, b: number): number =>
  (19595 * r + 38470 * g + 7471 * b + 0x8000) >> 16;

/** Each pixel of the result is the mean of what it covers; beyond the picture it is black. */
function averaged(picture: Picture, part: Part, width: number, height: number): Uint8ClampedArray {
  const columns = covers(part.left, part.width / width, width, picture.width);
  const rows = covers(part.top, part.height / height, height, picture.height);
  const all = (part.width / width) * (part.height / height);
  const out = new Uint8ClampedArray(4 * width * height);
  const sums = new Float64Array(4);
  rows.forEach((row, y) =>
    columns.forEach((column, x) => {
      sums.fill(0);
      for (const [v, high] of row)
        for (const [u, wide] of column) {
          const at = 4 * (v * picture.width + u);
          for (let c = 0; c < 4; c++) sums[c] += picture.data[at + c] * high * wide;
        }
      sums.forEach((sum, c) => (out[4 * (y * width + x) + c] = sum / all));
    }),
  );
  return out;
}

/** For each of the new pixels along one side, the old ones below it and how much of each. */
function covers(first: number, step: number, count: number, most: number): [number, number][][] {
  return Array.from({ length: count }, (_, i) => {
    const [from, to] = [Math.max(0, first + i * step), Math.min(most, first + (i + 1) * step)];
    const found: [number, number][] = [];
    for (let at = Math.floor(from); at < to; at++)
      found.push([at, Math.min(at + 1, to) - Math.max(at, from)]);
    return found;
  });
}
