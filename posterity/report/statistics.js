// The scores of a page, computed from the predictions in it as posterity.metrics computes them.

const BINS = 15; // of the expected calibration error

/** Numbers that Python packed: base64 of little-endian values of this kind. */
function unpacked(text, Kind) {
  return new Kind(Uint8Array.from(atob(text), sign => sign.charCodeAt(0)).buffer);
}

function mean(values) {
  let sum = 0;
  for (const value of values) sum += value;
  return sum / values.length;
}

/** The end of the central interval of a row at the level with this index; `side` is 0 for the lower end, 1 for the upper. */
function end(method, row, level, side) {
  const at = 2 * level + side;
  const away = method.ends ? method.ends[row * method.normal.length + at] : method.normal[at];
  const value = method.middle[row] + method.scale[row] * away;
  return method.log ? Math.exp(value) : value;
}

/** Coverage and mean width of the intervals of all rows at a level. */
function intervalScores(method, level) {
  const rows = Array.from(method.middle.keys());
  return {
    coverage: mean(rows.map(row => (method.within[row] <= level ? 1 : 0))),
    width: mean(rows.map(row => end(method, row, level, 1) - end(method, row, level, 0))),
  };
}

/** Log probabilities of one row at a temperature: log softmax of log p / T. */
function tempered(method, row, temperature) {
  const logs = Array.from(method.logs.subarray(row * method.classes, (row + 1) * method.classes), value => value / temperature);
  const top = Math.max(...logs);
  const total = top + Math.log(logs.reduce((sum, value) => sum + Math.exp(value - top), 0));
  return logs.map(value => value - total);
}

/** The bin of a confidence: m for (m / 15, (m + 1) / 15]. */
function binOf(confidence) {
  let bin = Math.max(0, Math.min(BINS - 1, Math.ceil(confidence * BINS) - 1));
  while (bin > 0 && confidence <= bin / BINS) bin -= 1;
  while (bin < BINS - 1 && confidence > (bin + 1) / BINS) bin += 1;
  return bin;
}

/** NLL, ECE and accuracy of a classifier at a temperature, and its bins of confidence. */
function classScores(method, labels, temperature) {
  const bins = Array.from({ length: BINS }, () => ({ count: 0, confidence: 0, correct: 0 }));
  let surprise = 0, correct = 0;
  labels.forEach((label, row) => {
    const logs = tempered(method, row, temperature);
    const top = Math.max(...logs);
    const right = logs.indexOf(top) === label ? 1 : 0;
    const bin = bins[binOf(Math.exp(top))];
    bin.count += 1;
    bin.confidence += Math.exp(top);
    bin.correct += right;
    surprise -= logs[label];
    correct += right;
  });
  const gaps = bins.map(bin => Math.abs(bin.correct - bin.confidence)); // count times |accuracy - confidence|
  return { nll: surprise / labels.length, ece: mean(gaps) * BINS / labels.length, accuracy: correct / labels.length, bins };
}

/** Counts [true class][decision] where the second class is decided for above a probability. */
function countsAbove(method, labels, threshold) {
  const counts = [[0, 0], [0, 0]];
  labels.forEach((label, row) => { counts[label][Math.exp(method.logs[2 * row + 1]) > threshold ? 1 : 0] += 1; });
  return counts;
}

/** The mean cost of such decisions, where a false alarm and a miss of the second class cost this much. */
function meanCost(counts, alarm, miss) {
  return (counts[0][1] * alarm + counts[1][0] * miss) / (counts[0][0] + counts[0][1] + counts[1][0] + counts[1][1]);
}

/** Counts [true class][most probable class]. */
function confusion(method, labels) {
  const counts = Array.from({ length: method.classes }, () => new Array(method.classes).fill(0));
  labels.forEach((label, row) => {
    const logs = method.logs.subarray(row * method.classes, (row + 1) * method.classes);
    counts[label][logs.indexOf(Math.max(...logs))] += 1;
  });
  return counts;
}
