// The figures of a report and their controls: which methods, what level, temperature, threshold and costs.

const data = JSON.parse(document.getElementById("numbers").textContent);
const MOST_DOTS = 300; // rows drawn in one panel: more of them hide each other
const STEPS = 8; // of the temperature slider, to a factor of 2
const box = name => document.querySelector(`[data-figure="${name}"]`);
const controls = name => document.getElementById(name);

const labels = data.labels ? unpacked(data.labels, Int32Array) : null;
const targets = data.targets ? unpacked(data.targets, Float64Array) : null;
const normal = data.normal ? unpacked(data.normal, Float64Array) : null;

/** The predictions of a method, as arrays. */
function opened(packed, index) {
  const out = { ...packed, colour: index % 8, dash: index };
  if (packed.logs) Object.assign(out, { logs: unpacked(packed.logs, Float32Array), classes: data.classes.length });
  if (packed.middle) {
    Object.assign(out, { normal, log: data.log, middle: unpacked(packed.middle, Float64Array), scale: unpacked(packed.scale, Float64Array),
      ends: packed.ends ? unpacked(packed.ends, Float32Array) : null, within: packed.within ? unpacked(packed.within, Uint8Array) : null });
  }
  return out;
}

const methods = data.methods.map(opened);

/** The methods whose boxes are ticked; the first of all where none is. */
function chosen() {
  const ticked = methods.filter(method => controls(`show-${method.word}`)?.checked);
  return ticked.length ? ticked : methods.slice(0, 1);
}

/** One chart for each of some methods, side by side, in the place of this name. */
function panels(name, specification, shown = chosen()) {
  const place = box(name);
  if (!place) return;
  while (place.children.length > shown.length) place.lastChild.remove();
  while (place.children.length < shown.length) place.append(make("div", { class: "panel" }));
  shown.forEach((method, index) => chart(place.children[index], specification(method)));
}

/** A value that can be read to its last digit by others, shown in few digits. */
function datum(key, value, digits = 4) {
  return make("data", { value: String(value), "data-key": key }, number(value, digits, Number.isInteger(value) ? 1 : digits));
}

/** A small table of numbers that a slider moves: a row for each chosen method. */
function board(name, label, heads, cells) {
  const place = box(name);
  if (place) place.replaceChildren(table(label, ["method", ...heads], chosen().map(method => [method.label, ...cells(method)])));
}

const percent = level => `${number(100 * level, 3)} %`;

// Numbers: predictions, their intervals, and what these hold.

function drawObserved(level) {
  const step = Math.ceil(targets.length / MOST_DOTS);
  const rows = Array.from(targets.keys()).filter(row => row % step === 0);
  const seen = row => (data.log ? Math.exp(targets[row]) : targets[row]);
  const ends = chosen().flatMap(method => rows.flatMap(row => [seen(row), data.log ? Math.exp(method.middle[row]) : method.middle[row]]));
  const wide = (Math.max(...ends) - Math.min(...ends)) || 1;
  const range = data.log ? [Math.min(...ends) / 1.15, Math.max(...ends) * 1.15] : [Math.min(...ends) - 0.12 * wide, Math.max(...ends) + 0.12 * wide];
  const clipped = value => Math.max(range[0], Math.min(range[1], value));
  const shown = Math.min(rows.length, targets.length);
  panels("observed", method => {
    const marks = inside => {
      const some = rows.filter(row => (method.within[row] <= level) === inside);
      return { kind: "spans", x: some.map(seen), y: some.map(row => (data.log ? Math.exp(method.middle[row]) : method.middle[row])),
        low: some.map(row => clipped(end(method, row, level, 0))), high: some.map(row => clipped(end(method, row, level, 1))),
        notes: some.map(row => data.rows[row]) };
    };
    return { title: method.label, square: true, diagonal: true, interval: `${percent(data.levels[level])} interval`,
      label: `Predicted against true values of ${shown} test rows by ${method.label}, with ${percent(data.levels[level])} intervals`,
      x: { label: `true ${data.unit}`, range, log: data.log }, y: { label: `predicted ${data.unit}`, range, log: data.log },
      series: [{ ...marks(true), name: "in its interval", colour: method.colour }, { ...marks(false), name: "missed", colour: "wrong" }] };
  });
}

function drawCoverage(level) {
  const lines = (key, scores) => chosen().map(method => ({ kind: "line", points: true, name: method.label, colour: method.colour, dash: method.dash,
    x: data.levels, y: data.levels.map((_, index) => scores(method, index)[key]) }));
  const rules = [{ x: data.levels[level] }];
  if (box("coverage")) {
    chart(box("coverage"), { title: "Coverage", label: "Share of test rows in their intervals, against the level of these", square: true, diagonal: true, rules,
      x: { label: "level", range: [0, 1] }, y: { label: "coverage", range: [0, 1] }, series: lines("coverage", intervalScores) });
    chart(box("width"), { title: "Sharpness", label: "Mean width of the intervals against their level", square: true, rules,
      x: { label: "level", range: [0, 1] }, y: { label: `mean width${data.unit ? `, ${data.unit}` : ""}`, zero: true }, series: lines("width", intervalScores) });
  }
  board("levels", "Coverage and width at the chosen level", ["coverage", "mean width"], method => {
    const scores = intervalScores(method, level);
    return [datum("coverage", scores.coverage), datum("width", scores.width)];
  });
}

function drawLine(level) {
  if (!data.line) return;
  const grid = unpacked(data.line.x, Float64Array);
  const x = Array.from(grid);
  panels("line", method => {
    const at = opened(data.line.methods[method.word], method.colour);
    const y = x.map((_, row) => (data.log ? Math.exp(at.middle[row]) : at.middle[row]));
    const [low, high] = [0, 1].map(side => x.map((_, row) => end(at, row, level, side)));
    return { title: method.label, label: `Mean and ${percent(data.levels[level])} band of ${method.label} over the input`,
      interval: `${percent(data.levels[level])} band`, x: { label: data.line.name }, y: { label: data.unit, log: data.log },
      series: [{ kind: "band", name: `${percent(data.levels[level])} band`, colour: method.colour, quiet: true, x, low, high },
        { kind: "line", name: "mean", colour: method.colour, x, y, low, high },
        { kind: "dots", name: "training rows", colour: "ink", ...data.line.train }] };
  }, chosen().filter(method => data.line.methods[method.word]));
}

function atLevel() {
  const level = Number(controls("level").value);
  const text = percent(data.levels[level]);
  controls("level").setAttribute("aria-valuetext", text);
  controls("level-shown").textContent = text;
  drawObserved(level);
  drawCoverage(level);
  drawLine(level);
}

// Classes: confidence, and what is decided.

function atTemperature() {
  const temperature = 2 ** (Number(controls("temperature").value) / STEPS);
  const text = number(temperature, 3);
  controls("temperature").setAttribute("aria-valuetext", text);
  controls("temperature-shown").textContent = text;
  const scores = new Map(chosen().map(method => [method, classScores(method, labels, temperature)]));
  const least = Math.max(0, 1 / data.classes.length - 0.05);
  panels("reliability", method => {
    const bins = scores.get(method).bins.filter(bin => bin.count);
    const share = bin => bin.count / labels.length;
    return { title: method.label, square: true, diagonal: true, label: `Accuracy against confidence of ${method.label} on the test rows`,
      x: { label: "confidence", range: [least, 1.02] }, y: { label: "accuracy", range: [-0.02, 1.04] },
      series: [{ kind: "dots", colour: method.colour, x: bins.map(bin => bin.confidence / bin.count), y: bins.map(bin => bin.correct / bin.count),
        sizes: bins.map(bin => 3 + 14 * Math.sqrt(share(bin))), notes: bins.map(bin => `${number(bin.count)} rows`) }] };
  });
  panels("confidence", method => ({ title: method.label, label: `How often ${method.label} has which confidence`, x: { label: "confidence", range: [least, 1.02] },
    y: { label: "share of rows", zero: true },
    series: [{ kind: "bars", colour: method.colour, edges: Array.from({ length: BINS + 1 }, (_, index) => index / BINS),
      y: scores.get(method).bins.map(bin => (bin.count ? bin.count / labels.length : NaN)) }] }));
  board("scaled", "NLL and ECE at the chosen temperature", ["NLL", "ECE", "accuracy"], method => {
    const { nll, ece, accuracy } = scores.get(method);
    return [datum("nll", nll), datum("ece", ece, 2), datum("accuracy", accuracy)];
  });
}

function drawConfusion() {
  const place = box("confusion");
  if (!place) return;
  place.replaceChildren(...chosen().map(method => {
    const counts = confusion(method, labels);
    const rows = counts.map((line, label) => [data.classes[label], ...line.map(count => number(count))]);
    const grid = table(`Confusion of ${method.label}`, ["true", ...data.classes], rows);
    grid.querySelectorAll("tbody tr").forEach((line, label) => line.querySelectorAll("td").forEach((cell, answer) => {
      const share = counts[label][answer] / Math.max(1, counts[label].reduce((a, b) => a + b, 0));
      if (counts[label][answer]) cell.className = `${label === answer ? "right" : "wrong"} shade${Math.min(4, Math.floor(share * 5))}`;
    }));
    return make("div", { class: "panel" }, make("h3", {}, method.label), grid);
  }));
}

function cost(name) {
  const value = Number(controls(name).value);
  return Number.isFinite(value) && value >= 0 ? value : 0;
}

function atThreshold() {
  if (!controls("threshold")) return;
  const threshold = Number(controls("threshold").value) / 100;
  const [alarm, miss] = [cost("alarm"), cost("miss")];
  controls("threshold").setAttribute("aria-valuetext", percent(threshold));
  controls("threshold-shown").textContent = percent(threshold);
  const wise = alarm + miss > 0 ? alarm / (alarm + miss) : 0.5;
  box("wise").textContent = `At these costs, probabilities that are right would be cut at ${number(wise, 3)}.`;
  const cuts = Array.from({ length: 99 }, (_, index) => (index + 1) / 100);
  chart(box("costs"), { label: "Mean cost of a decision against the threshold", x: { label: `threshold on the probability of ${data.classes[1]}`, range: [0, 1] },
    y: { label: "mean cost", zero: true }, rules: [{ x: threshold }],
    series: chosen().map(method => ({ kind: "line", name: method.label, colour: method.colour, dash: method.dash, x: cuts,
      y: cuts.map(cut => meanCost(countsAbove(method, labels, cut), alarm, miss)) })) });
  board("decided", "Decisions at the chosen threshold", ["mean cost", "false alarms", "misses", "hits", "correct rejections"], method => {
    const counts = countsAbove(method, labels, threshold);
    return [datum("cost", meanCost(counts, alarm, miss)), datum("alarms", counts[0][1]), datum("misses", counts[1][0]),
      datum("hits", counts[1][1]), datum("rejections", counts[0][0])];
  });
}

/** The most probable class over two inputs, paler where it is less probable. */
function drawMap() {
  if (!data.map) return;
  const style = getComputedStyle(document.documentElement);
  const colour = name => style.getPropertyValue(name).trim().match(/[0-9a-f]{2}/gi).map(part => parseInt(part, 16));
  const [paper, inks] = [colour("--page"), data.classes.map((_, index) => colour(`--c${index % 8}`))];
  panels("map", method => {
    const field = data.map.methods[method.word];
    const spec = { title: method.label, square: true, label: `The most probable class by ${method.label} over the two inputs, with training rows`,
      x: { label: data.map.names[0], range: data.map.x }, y: { label: data.map.names[1], range: data.map.y },
      series: data.map.train.map((dots, index) => ({ kind: "dots", name: data.classes[index], colour: index % 8, ...dots })) };
    const [winners, sure] = [unpacked(field.winner, Uint8Array), unpacked(field.sure, Uint8Array)];
    const side = Math.sqrt(winners.length);
    const canvas = make("canvas", { width: side, height: side });
    const brush = canvas.getContext("2d");
    const image = brush.createImageData(side, side);
    winners.forEach((winner, index) => {
      const share = 0.06 + 0.5 * (sure[index] / 255 - 1 / inks.length) / (1 - 1 / inks.length);
      for (let part = 0; part < 3; part += 1) image.data[4 * index + part] = paper[part] + share * (inks[winner][part] - paper[part]);
      image.data[4 * index + 3] = 255;
    });
    brush.putImageData(image, 0, 0);
    return { ...spec, image: canvas.toDataURL() };
  }, chosen().filter(method => data.map.methods[method.word]));
}

// All of it.

function drawAll() {
  if (targets) atLevel();
  if (labels) {
    atTemperature();
    drawConfusion();
    atThreshold();
    drawMap();
  }
  const words = new Set(chosen().map(method => method.word));
  for (const part of document.querySelectorAll("[data-method]")) part.hidden = !words.has(part.dataset.method);
}

document.body.append(make("div", { id: "said", class: "unseen", "aria-live": "polite" }));
for (const part of document.querySelectorAll("[data-script]")) part.hidden = false;
for (const [name, spec] of Object.entries(data.figures)) if (box(name)) chart(box(name), spec);
for (const [name, change] of [["level", atLevel], ["temperature", atTemperature], ["threshold", atThreshold], ["alarm", atThreshold], ["miss", atThreshold]]) {
  controls(name)?.addEventListener("input", change);
}
controls("methods")?.addEventListener("change", drawAll);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
const folded = () => document.querySelectorAll("details:not(.numbers):not([open])");
let unfolded = []; // on paper nothing can be opened
addEventListener("beforeprint", () => { unfolded = [...folded()]; for (const part of unfolded) part.open = true; });
addEventListener("afterprint", () => { for (const part of unfolded) part.open = false; });
if (methods.length) drawAll();
