/** The map of training clients, with the person on it. */

import type { Familiarity, Verdict } from "../familiarity";
import { makeSvg } from "./dom";

const SIZE = 320;
const EDGE = 16; // around the squares

/** Where a position is on the picture, 0 to 1 from the left and from the top; beyond: off the map. */
export function placeOn(map: Familiarity["map"], [x, y]: [number, number]): [number, number] {
  const [left, bottom] = map.low;
  const [right, top] = map.high;
  return [(x - left) / (right - left || 1), (top - y) / (top - bottom || 1)];
}

export function drawMap({ map }: Familiarity, verdict: Verdict): SVGElement {
  const inner = SIZE - 2 * EDGE;
  const most = Math.max(1, ...map.counts.flat());
  const [rows, columns] = [map.counts.length, map.counts[0].length];
  const squares = map.counts.flatMap((row, i) =>
    row.flatMap((count, j) => {
      if (!count) return [];
      const at = { x: EDGE + (j * inner) / columns, y: SIZE - EDGE - ((i + 1) * inner) / rows };
      const size = { width: inner / columns, height: inner / rows };
      return [makeSvg("rect", { class: "cell", ...at, ...size, opacity: 0.15 + 0.85 * Math.sqrt(count / most) })];
    }),
  );
  const [across, down] = placeOn(map, verdict.position).map((share) => EDGE + Math.min(1, Math.max(0, share)) * inner);
  const place = { cx: across, cy: down };
  const frame = makeSvg("rect", { class: "frame", x: 1, y: 1, width: SIZE - 2, height: SIZE - 2, rx: 12 });
  const label = `Map of ${map.counts.flat().reduce((a, b) => a + b, 0)} training clients; a dot marks these images.`;
  return makeSvg(
    "svg",
    { viewBox: `0 0 ${SIZE} ${SIZE}`, role: "img", "aria-label": label },
    frame,
    ...squares,
    makeSvg("circle", { class: "halo", ...place, r: 11 }),
    makeSvg("circle", { class: verdict.foreign ? "dot foreign" : "dot", ...place, r: 6 }),
  );
}

/** In words: whether these images are like those of training clients. */
export function mapText(known: Familiarity, verdict: Verdict): string {
  const off = placeOn(known.map, verdict.position).some((share) => share < 0 || share > 1);
  const numbers = `(distance ${short(verdict.score)}, limit ${short(verdict.limit)})`;
  const where = off ? " They lie off the map, so the dot stands at its edge." : "";
  return verdict.foreign
    ? `These images lie far from everybody the model was taught by ${numbers}.${where}`
    : `The dot: these images are like those of people the model was taught by ${numbers}.${where}`;
}

const short = (value: number): string => (value < 100 ? value.toFixed(1) : value.toFixed(0));
