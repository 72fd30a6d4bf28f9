// Charts in inline SVG, with a tooltip for pointer and keyboard, and a table of the numbers behind each.
//
// A chart is a specification: {label, title, x: axis, y: axis, square, diagonal, image, rules: [...],
// series: [...]}. An axis is
// {label, range, log, zero, whole, names}. A series is {name, kind, colour, x, y, low, high, edges, notes, quiet}; its kind
// is line, dots, spans, bars, rows or band. Text reaches the page as text nodes and attributes, never as HTML.

const SVG = "http://www.w3.org/2000/svg";
const DRAWN = new Set(["svg", "g", "path", "line", "circle", "rect", "text", "image"]);
const DASHES = [null, "7 3", "2 3", "9 3 2 3", "4 2", "12 4", "1 2", "6 2 1 2 1 2"];
const LETTER = 7; // width of a letter of an axis, in pixels

/** An element with attributes and children, of SVG where the name is one that we draw with. */
function make(name, attributes = {}, ...children) {
  const element = DRAWN.has(name) ? document.createElementNS(SVG, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children);
  return element;
}

/** A number for people: thousands marks, and so many significant digits, `least` of them even where they are 0. */
function number(value, digits = 4, least = 1) {
  if (value === null || value === undefined || Number.isNaN(value)) return "-";
  if (!Number.isFinite(value)) return value > 0 ? "infinite" : "-infinite";
  const size = Math.abs(value);
  if (size !== 0 && (size >= 1e9 || size < 1e-4)) return value.toExponential(digits - 2).replace("e+", "e");
  const options = size >= 10 ** digits ? { maximumFractionDigits: 0 } : { maximumSignificantDigits: digits, minimumSignificantDigits: least };
  return value.toLocaleString("en-US", options);
}

/** Positions of ticks within a range, at steps of 1, 2 or 5 times a power of ten; of others where these leave too few. */
function ticks([low, high], axis, count) {
  if (axis.names) return axis.names.map((_, index) => index);
  if (axis.log) {
    const powers = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high) + 1e-9; power += 1) powers.push(power);
    const factors = powers.length > 3 ? [1] : powers.length > 1 ? [1, 2, 5] : [1, 1.5, 2, 3, 5, 7];
    const every = Math.ceil(powers.length / 8);
    return powers.filter((_, index) => index % every === 0).flatMap(power => factors.map(f => f * 10 ** power))
      .filter(tick => tick >= low * 0.9999 && tick <= high * 1.0001);
  }
  const rough = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough));
  const spaced = factors => {
    let step = factors.find(factor => factor * power >= rough * 0.999) * power;
    if (axis.whole) step = Math.max(1, Math.round(step));
    const first = Math.ceil(low / step - 1e-9);
    const last = Math.floor(high / step + 1e-9);
    return Array.from({ length: Math.max(0, last - first + 1) }, (_, index) => +((first + index) * step).toPrecision(12));
  };
  const [usual, other] = [spaced([1, 2, 5, 10]), spaced([1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10])];
  return usual.length >= 3 || usual.length >= other.length ? usual : other;
}

/** What stands at a tick. */
function tickLabel(tick, axis) {
  if (!axis.names) return number(tick, 6);
  const name = axis.names[tick];
  return name.length > 18 ? `${name.slice(0, 17)}…` : name;
}

/** The range of an axis: as given, or that of the marks with a margin. */
function span(axis, key, series) {
  if (axis.range) return axis.range;
  if (axis.names) return [-0.6, axis.names.length - 0.4];
  const all = series.flatMap(each => [...(each[key] || []), ...(key === "x" ? each.edges || [] : []),
    ...((each.along || "y") === key ? [...(each.low || []), ...(each.high || [])] : [])])
    .filter(value => Number.isFinite(value) && (!axis.log || value > 0));
  if (axis.zero) all.push(0);
  if (!all.length) return axis.log ? [0.1, 10] : [0, 1];
  let low = all.reduce((a, b) => Math.min(a, b));
  let high = all.reduce((a, b) => Math.max(a, b));
  if (axis.log) return low === high ? [low / 2, high * 2] : [low / (high / low) ** 0.04, high * (high / low) ** 0.04];
  const margin = 0.04 * (high - low) || 0.5 * Math.abs(high) || 0.5;
  if (!(axis.zero && low === 0)) low -= margin;
  if (!(axis.zero && high === 0)) high += margin;
  return [low, high];
}

/** The function from values of an axis to pixels. */
function scale(axis, [low, high], [first, last]) {
  const [a, b] = axis.log ? [Math.log(low), Math.log(high)] : [low, high];
  return value => first + ((axis.log ? Math.log(value) : value) - a) / (b - a || 1) * (last - first);
}

/** The words of a mark: of its series, its place, its interval, and its note. */
function words(spec, series, index) {
  const value = key => {
    const axis = spec[key];
    const at = (series[key] || [])[index];
    return axis.names ? axis.names[at] : number(at, 5);
  };
  const parts = series.edges
    ? [`${spec.x.label} ${number(series.edges[index])} to ${number(series.edges[index + 1])}`]
    : [spec.x.names || !spec.x.label ? value("x") : `${spec.x.label} ${value("x")}`];
  if (series.y) parts.push(spec.y.names || !spec.y.label ? value("y") : `${spec.y.label} ${value("y")}`);
  if (series.low && Number.isFinite(series.low[index])) {
    parts.push(`${spec.interval || "interval"} ${number(series.low[index], 5)} to ${number(series.high[index], 5)}`);
  }
  if (series.notes && series.notes[index]) parts.push(series.notes[index]);
  return `${series.name ? `${series.name}: ` : ""}${parts.join(", ")}`;
}

/** Draw the marks of a series into the group, bars `over` others as outlines; gives where each is, for the tooltip. */
function drawSeries(group, series, x, y, base, over) {
  const marks = [];
  const colour = `c${series.colour ?? 0}`;
  const count = (series.y || series.x || []).length;
  const there = index => [series.x ? series.x[index] : 0, series.y ? series.y[index] : 0].every(Number.isFinite);
  if (series.kind === "band") {
    const path = series.x.map((at, i) => `${i ? "L" : "M"}${x(at).toFixed(1)},${y(series.high[i]).toFixed(1)}`).join("")
      + series.x.map((at, i) => `L${x(at).toFixed(1)},${y(series.low[i]).toFixed(1)}`).reverse().join("") + "Z";
    group.append(make("path", { d: path, class: `band ${colour}` }));
    return marks;
  }
  if (series.kind === "line") {
    let path = "", pen = "M";
    for (let i = 0; i < count; i += 1) {
      if (!there(i)) { pen = "M"; continue; }
      path += `${pen}${x(series.x[i]).toFixed(1)},${y(series.y[i]).toFixed(1)}`;
      pen = "L";
    }
    const dash = DASHES[(series.dash ?? 0) % DASHES.length];
    group.append(make("path", { d: path, class: `line ${colour}${series.thin ? " thin" : ""}`, "stroke-dasharray": dash }));
  }
  for (let i = 0; i < count; i += 1) {
    if (!there(i)) continue;
    let [px, py] = [x(series.x ? series.x[i] : 0), y(series.y ? series.y[i] : 0)];
    let area = null; // of a bar, all of which can be pointed at
    if (series.kind === "bars") {
      const [left, right] = [x(series.edges[i]), x(series.edges[i + 1])];
      const top = Math.min(py, y(base));
      group.append(make("rect", { x: left + 0.5, y: top, width: Math.max(1, right - left - 1),
        height: Math.abs(y(base) - py), class: `bar ${colour}${over ? " over" : ""}` }));
      px = (left + right) / 2;
      area = [left, right, top, Math.max(py, y(base))];
    } else if (series.kind === "rows") {
      group.append(make("rect", { x: Math.min(px, x(0)), y: py - 6, width: Math.abs(px - x(0)), height: 12, class: `bar ${colour}` }));
      if (series.low) group.append(make("line", { x1: x(series.low[i]), x2: x(series.high[i]), y1: py, y2: py, class: "error" }));
      area = [Math.min(px, x(0)), Math.max(px, x(0)), py - 6, py + 6];
    } else if (series.kind === "spans" || series.kind === "dots") {
      if (series.low) group.append(make("line", { x1: px, x2: px, y1: y(series.low[i]), y2: y(series.high[i]), class: `span ${colour}` }));
      group.append(make("circle", { cx: px, cy: py, r: series.sizes ? series.sizes[i] : 2.6, class: `dot ${colour}` }));
    } else if (series.kind === "line" && series.points) {
      group.append(make("circle", { cx: px, cy: py, r: 2.6, class: `dot ${colour}` }));
    }
    if (!series.quiet) marks.push({ px, py, area, series, index: i });
  }
  return marks;
}

/** The axes, their ticks and labels, and the lines to compare with. */
function drawAxes(svg, spec, x, y, box) {
  const axes = make("g", { class: "axes" });
  const letters = Math.max(0, ...ticks(box.x, spec.x, 4).map(tick => tickLabel(tick, spec.x).length));
  const xs = ticks(box.x, spec.x, Math.max(2, Math.floor((box.right - box.left) / Math.max(50, LETTER * letters + 16))));
  const ys = ticks(box.y, spec.y, Math.max(2, Math.floor((box.bottom - box.top) / 30)));
  for (const tick of ys) {
    if (!spec.y.names) axes.append(make("line", { x1: box.left, x2: box.right, y1: y(tick), y2: y(tick), class: "grid" }));
    axes.append(make("text", { x: box.left - 6, y: y(tick) + 4, "text-anchor": "end" }, tickLabel(tick, spec.y)));
  }
  for (const tick of xs) {
    axes.append(make("line", { x1: x(tick), x2: x(tick), y1: box.top, y2: box.bottom, class: "grid" }));
    const label = tickLabel(tick, spec.x);
    const at = Math.min(x(tick), box.width - 0.5 * LETTER * label.length); // the last one would be cut
    axes.append(make("text", { x: at, y: box.bottom + 17, "text-anchor": "middle" }, label));
  }
  axes.append(make("line", { x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom, class: "edge" }));
  const middle = (box.left + box.right) / 2;
  axes.append(make("text", { x: middle, y: box.bottom + 36, "text-anchor": "middle", class: "name" }, spec.x.label || ""));
  if (spec.y.label) axes.append(make("text", { x: 2, y: box.top - 14, "text-anchor": "start", class: "name" }, spec.y.label));
  if (spec.diagonal) {
    const low = Math.max(box.x[0], box.y[0]), high = Math.min(box.x[1], box.y[1]);
    if (low < high) axes.append(make("line", { x1: x(low), x2: x(high), y1: y(low), y2: y(high), class: "rule" }));
  }
  for (const rule of spec.rules || []) {
    const across = rule.y !== undefined;
    const at = across ? y(rule.y) : x(rule.x);
    axes.append(make("line", across ? { x1: box.left, x2: box.right, y1: at, y2: at, class: "rule" }
      : { x1: at, x2: at, y1: box.top, y2: box.bottom, class: "rule" }));
  }
  svg.append(axes);
}

/** Draw a chart into the element, in place of what was there, and once more whenever its width changes. */
function chart(element, spec) {
  const open = element.querySelector("details")?.open;
  const focused = document.activeElement?.parentElement === element && document.activeElement.className === "chart";
  const frame = make("div", { class: "chart", tabindex: "0", role: "group", "aria-roledescription": "chart",
    "aria-label": `${spec.label}. Arrow keys go from mark to mark.` });
  const tip = make("div", { class: "tip", "aria-hidden": "true", hidden: true });
  const parts = [frame, legend(spec), numbers(spec)];
  if (spec.title) parts.unshift(make("h3", {}, spec.title));
  element.replaceChildren(...parts.filter(Boolean));
  if (open) element.querySelector("details").open = true;
  let marks = [];
  let width = 0;
  const draw = () => {
    width = Math.max(220, frame.clientWidth || 320);
    const x = span(spec.x, "x", spec.series), y = span(spec.y, "y", spec.series);
    const room = Math.max(1, ...ticks(y, spec.y, 6).map(tick => tickLabel(tick, spec.y).length));
    const [left, right, top] = [Math.min(0.45 * width, 12 + LETTER * room), width - 14, spec.y.label ? 30 : 10];
    const height = spec.square ? top + right - left + 42 // equal lengths of both axes
      : spec.y.names ? 60 + 24 * spec.y.names.length : Math.min(300, Math.max(200, 0.55 * width));
    const box = { left, right, top, bottom: height - 42, width, x, y };
    const across = scale(spec.x, x, [box.left, box.right]);
    const upwards = spec.y.names ? scale(spec.y, y, [box.top, box.bottom]) : scale(spec.y, y, [box.bottom, box.top]);
    const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true", focusable: "false" });
    if (spec.image) {
      svg.append(make("image", { href: spec.image, x: box.left, y: box.top, width: box.right - box.left, height: box.bottom - box.top, preserveAspectRatio: "none" }));
    }
    drawAxes(svg, spec, across, upwards, box);
    const group = make("g");
    const base = spec.y.log ? y[0] : Math.max(y[0], Math.min(0, y[1]));
    marks = spec.series.flatMap((series, index) => drawSeries(group, series, across, upwards, base, index > 0));
    svg.append(group, make("circle", { r: 6, class: "ring", visibility: "hidden" }));
    frame.replaceChildren(svg, tip);
  };
  draw();
  explain(frame, tip, () => marks, spec);
  new ResizeObserver(() => { if (frame.isConnected && frame.clientWidth && Math.abs(frame.clientWidth - width) > 1) draw(); }).observe(frame);
  if (focused) frame.focus();
}

/** Show the nearest mark to the pointer, and the next one at each arrow key, in the tooltip. */
function explain(frame, tip, marks, spec) {
  let at = -1;
  const hide = () => { tip.hidden = true; frame.querySelector(".ring")?.setAttribute("visibility", "hidden"); };
  const show = (index, aloud) => {
    const mark = marks()[index];
    if (!mark) return;
    at = index;
    const svg = frame.querySelector("svg");
    const size = svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;
    const ring = frame.querySelector(".ring");
    for (const [key, value] of [["cx", mark.px], ["cy", mark.py], ["visibility", "visible"]]) ring.setAttribute(key, value);
    tip.textContent = words(spec, mark.series, mark.index);
    tip.hidden = false;
    const room = frame.clientWidth - tip.offsetWidth;
    tip.style.left = `${Math.max(0, Math.min(room, mark.px * size - tip.offsetWidth / 2))}px`;
    tip.style.top = `${mark.py * size - tip.offsetHeight - 12 < 0 ? mark.py * size + 14 : mark.py * size - tip.offsetHeight - 12}px`;
    if (aloud) document.getElementById("said").textContent = tip.textContent;
  };
  frame.addEventListener("pointermove", event => {
    const svg = frame.querySelector("svg");
    const seen = svg.getBoundingClientRect();
    const size = seen.width / svg.viewBox.baseVal.width;
    const [px, py] = [(event.clientX - seen.left) / size, (event.clientY - seen.top) / size];
    let best = -1, least = 40 ** 2;
    marks().forEach((mark, index) => {
      const [left, right, top, bottom] = mark.area || [mark.px, mark.px, mark.py, mark.py];
      const near = [Math.max(left, Math.min(right, px)), Math.max(top, Math.min(bottom, py))];
      const away = (near[0] - px) ** 2 + (near[1] - py) ** 2 + (mark.area ? 1e-6 * ((mark.px - px) ** 2 + (mark.py - py) ** 2) : 0);
      if (away < least) [best, least] = [index, away];
    });
    if (best < 0) hide(); else show(best, false);
  });
  frame.addEventListener("pointerleave", hide);
  frame.addEventListener("blur", hide);
  frame.addEventListener("keydown", event => {
    const last = marks().length - 1;
    const next = { ArrowRight: at + 1, ArrowDown: at + 1, ArrowLeft: at - 1, ArrowUp: at - 1, Home: 0, End: last }[event.key];
    if (event.key === "Escape") hide();
    if (next === undefined || last < 0) return;
    event.preventDefault();
    show(Math.max(0, Math.min(last, next)), true);
  });
}

/** Names beside samples of their colours, where there is more than one. */
function legend(spec) {
  const named = spec.series.filter(series => series.name && !series.hidden);
  if (named.length < 2) return null;
  const samples = named.map(series => {
    const svg = make("svg", { viewBox: "0 0 26 10", width: 26, height: 10, "aria-hidden": "true", focusable: "false" });
    const colour = `c${series.colour ?? 0}${series.kind === "bars" && series !== spec.series[0] ? " over" : ""}`;
    const line = { x1: 1, x2: 25, y1: 5, y2: 5, class: `line ${colour}`, "stroke-dasharray": DASHES[(series.dash ?? 0) % DASHES.length] };
    if (series.kind === "line") svg.append(make("line", line));
    else if (series.kind === "dots" || series.kind === "spans") svg.append(make("circle", { cx: 13, cy: 5, r: 4, class: `dot ${colour}` }));
    else svg.append(make("rect", { x: 6, y: 0, width: 14, height: 10, class: `${series.kind === "band" ? "band" : "bar"} ${colour}` }));
    return make("li", {}, svg, series.name);
  });
  return make("ul", { class: "legend" }, ...samples);
}

/** The numbers of a chart as a table, made when it is opened. */
function numbers(spec) {
  const details = make("details", { class: "numbers" }, make("summary", {}, "Numbers"));
  details.addEventListener("toggle", () => {
    if (!details.open || details.querySelector("table")) return;
    const shown = spec.series.filter(series => series.kind !== "band" || series.quiet !== true);
    const between = shown.some(series => series.low);
    const across = spec.y.names ? [spec.y.label || "name", spec.x.label || "value"] : [spec.x.label || "x", spec.y.label || "value"];
    const heads = [...(shown.some(series => series.name) ? ["series"] : []), ...across,
      ...(between ? ["from", "to"] : []), ...(shown.some(series => series.notes) ? ["note"] : [])];
    const rows = shown.flatMap(series => (series.y || series.x).map((_, i) => {
      const cell = key => spec[key].names ? spec[key].names[series[key][i]] : series[key] ? number(series[key][i], 6) : "";
      const place = series.edges ? `${number(series.edges[i])} to ${number(series.edges[i + 1])}` : cell("x");
      const pair = [place, series.y ? cell("y") : ""];
      return [...(heads[0] === "series" ? [series.name || ""] : []), ...(spec.y.names ? pair.reverse() : pair),
        ...(between ? [series.low ? number(series.low[i], 6) : "", series.high ? number(series.high[i], 6) : ""] : []),
        ...(heads.includes("note") ? [(series.notes || [])[i] || ""] : [])];
    }));
    details.append(table(spec.label, heads, rows));
  });
  return details;
}

/** A table in a region that scrolls where it is too wide. */
function table(label, heads, rows) {
  const line = (cells, scope) => make("tr", {}, ...cells.map((cell, index) =>
    make(index && !scope ? "td" : "th", scope || !index ? { scope: scope || "row" } : {}, cell)));
  return make("div", { class: "wide", role: "region", tabindex: "0", "aria-label": label }, make("table", {},
    make("thead", {}, line(heads, "col")), make("tbody", {}, ...rows.map(cells => line(cells, null)))));
}
