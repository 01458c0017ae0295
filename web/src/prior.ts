/** How often each class occurs among a client's points: EM, as in `src/flowdup/prior.py`. */

const LEAST = 1e-6; // the share that a class keeps

/** strength log q, from logits [n, classes] row by row. */
export function logPrior(
  logits: Float32Array,
  classes: number,
  steps: number,
  sparsity: number,
  strength: number,
  typical = 0,
  profile: number[] = [],
): Float64Array {
  const count = logits.length / classes;
  const shift = new Float64Array(classes);
  const weights = new Float64Array(classes);
  let mean = new Float64Array(classes);
  for (let step = 0; step < steps; step++) {
    mean = new Float64Array(classes);
    for (let row = 0; row < logits.length; row += classes) {
      let most = -Infinity;
      for (let c = 0; c < classes; c++) most = Math.max(most, logits[row + c] + shift[c]);
      let total = 0;
      for (let c = 0; c < classes; c++)
        total += weights[c] = Math.exp(logits[row + c] + shift[c] - most);
      for (let c = 0; c < classes; c++) mean[c] += weights[c] / total / count;
    }
    const q = mean.map((share) => Math.max(share - sparsity, LEAST));
    const sum = q.reduce((a, b) => a + b, 0);
    for (let c = 0; c < classes; c++) shift[c] = strength * Math.log(q[c] / sum);
  }
  return profile.length ? asTypical(shift, mean, strength, typical, profile) : shift;
}

/** strength log q, moved to shares of the profile, the largest first, in the order of the mean. */
function asTypical(
  shift: Float64Array,
  mean: Float64Array,
  strength: number,
  typical: number,
  profile: number[],
): Float64Array {
  const order = [...shift.keys()].sort((a, b) => mean[b] - mean[a]); // stable
  const moved = shift.slice();
  order.forEach((c, rank) => {
    const usual = strength * Math.log(Math.max(profile[rank], LEAST));
    moved[c] += typical * (usual - shift[c]);
  });
  return moved;
}
