/** Whether a client's data look like those of training clients: `src/flowdup/familiarity.py`. */

export interface Familiarity {
  mean: number[]; // [width]
  directions: number[][]; // [m, width]
  variances: number[]; // [m]
  rest: number; // the variance in every other direction
  limits: Record<string, number>; // of scores, by the number of points
  rate: number; // of clients like those of training that are called foreign
  map: { low: [number, number]; high: [number, number]; counts: number[][] }; // of training clients
}

/** What is known of one client. */
export interface Verdict {
  score: number;
  limit: number;
  foreign: boolean;
  position: [number, number]; // on the map
}

export function judge(known: Familiarity, embedding: Float32Array, points: number): Verdict {
  const [value, most] = [score(known, embedding), limit(known.limits, points)];
  const [x, y] = projections(known, embedding);
  return { score: value, limit: most, foreign: !(value <= most), position: [x, y ?? 0] };
}

/** How far r(X) lies from the training clients'. */
export function score(known: Familiarity, embedding: Float32Array): number {
  const along = projections(known, embedding);
  const squares = along.map((value) => value * value);
  const all = away(known, embedding).reduce((sum, value) => sum + value * value, 0);
  const left = Math.max(0, all - squares.reduce((a, b) => a + b, 0));
  return squares.reduce((sum, s, i) => sum + s / known.variances[i], 0) + left / known.rest;
}

/** The largest score of a client with so many points that is not foreign. */
export function limit(limits: Record<string, number>, points: number): number {
  const sizes = Object.keys(limits).map(Number).sort((a, b) => a - b);
  const below = sizes.filter((size) => size <= points).at(-1) ?? sizes[0];
  const above = sizes.find((size) => size >= points) ?? sizes.at(-1)!;
  if (below >= above) return limits[below];
  const share = Math.log(points / below) / Math.log(above / below);
  return Math.exp((1 - share) * Math.log(limits[below]) + share * Math.log(limits[above]));
}

const away = ({ mean }: Familiarity, embedding: Float32Array): Float64Array =>
  Float64Array.from(embedding, (value, i) => Math.fround(value - mean[i]));

function projections(known: Familiarity, embedding: Float32Array): number[] {
  const from = away(known, embedding);
  return known.directions.map((direction) =>
    direction.reduce((sum, value, i) => sum + value * from[i], 0),
  );
}
