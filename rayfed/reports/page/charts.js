// Charts. All are drawn from the data in the page and from what the filters leave, so they always agree with the tables.

const DASHES = ["", "7 4", "2 3", "9 3 2 3"];
const VIRIDIS = ["#440154", "#472d7b", "#3b528b", "#2c728e", "#21918c", "#28ae80", "#5ec962", "#addc30", "#fde725"];
const WIDTH = 860;
const MOST_BUBBLES = 50; // of clients or classes; with more, a partition is drawn as a heat map
const MOST_PARTITIONS = 6;
const LOG_RATIO = 20; // of the largest value to the smallest, from which an axis is logarithmic

const least = (values) => values.reduce((a, b) => Math.min(a, b), Infinity);
const greatest = (values) => values.reduce((a, b) => Math.max(a, b), -Infinity);
const short = (value) => String(+value.toPrecision(4));
const rowLabel = (method) => { const text = label(method); return text.length > 44 ? `${text.slice(0, 43)}…` : text; };
const note = (text) => element("p", { class: "note" }, text);

// A method keeps its colour and its dashes whatever the filters show.
function styleOf(index) {
  return { colour: COLOURS[index % COLOURS.length], dash: DASHES[Math.floor(index / COLOURS.length) % DASHES.length] };
}

function categoryColour(index, count) {
  return count <= COLOURS.length ? COLOURS[index] : `hsl(${Math.round(360 * index / count)} 65% 50%)`;
}

// A colour between dark blue (0) and yellow (1), of which the better end is the yellow one
function heatColour(share) {
  const place = Math.min(1, Math.max(0, share)) * (VIRIDIS.length - 1);
  const index = Math.min(VIRIDIS.length - 2, Math.floor(place));
  const parts = [VIRIDIS[index], VIRIDIS[index + 1]].map((hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16)));
  const mixed = parts[0].map((from, i) => Math.round(from + (parts[1][i] - from) * (place - index)));
  return { colour: `rgb(${mixed.join(",")})`, ink: 0.3 * mixed[0] + 0.59 * mixed[1] + 0.11 * mixed[2] > 128 ? "#000" : "#fff" };
}

function ticks(low, high) {
  const raw = (high - low || Math.abs(high) || 1) / 6;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw);
  const list = [];
  for (let tick = Math.ceil(low / step) * step; tick <= high + step * 1e-9; tick += step) list.push(+tick.toPrecision(10));
  return list;
}

function logTicks(low, high) {
  const steps = high / low > 1000 ? [1] : [1, 2, 5];
  const list = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
    list.push(...steps.map((m) => +(m * 10 ** power).toPrecision(10)));
  }
  return list.filter((tick) => tick >= low * 0.999 && tick <= high * 1.001);
}

function padded(values, share) {
  const low = least(values), high = greatest(values);
  const pad = (high - low || Math.abs(high) || 1) * share;
  return [low - pad, high + pad];
}

function legend(entries) {
  return element("div", { class: "legend" }, ...entries.map(({ text, colour, dash = "" }) => {
    const sample = drawn("svg", { width: 26, height: 8, "aria-hidden": "true" });
    sample.append(drawn("line", { x1: 0, x2: 24, y1: 4, y2: 4, stroke: colour, "stroke-width": 3, "stroke-dasharray": dash }));
    return element("span", {}, sample, ` ${text}`);
  }));
}

// Lines with bands or bars of one standard deviation.
// lines: [{ text, colour, dash, points: [{ x, y, low, high, tip, ring }] }]; flat: [{ text, colour, y }] go from side to side.
function linePlot({ lines, flat = [], xLabel, yLabel, xTicks = null, log = false, whole = false, bars = false, width = WIDTH }) {
  const [height, left, right, bottom, top] = [width < WIDTH ? 300 : 400, 56, 10, 44, 10];
  const points = lines.flatMap((line) => line.points);
  const along = log ? Math.log10 : (x) => x;
  const [x0, x1] = points.length ? padded(points.map((point) => along(point.x)), 0.04) : [0, 1];
  const [y0, y1] = padded([...points.flatMap((point) => [point.low, point.high]), ...flat.map((line) => line.y)], 0.04);
  const px = (x) => left + (along(x) - x0) / (x1 - x0) * (width - left - right);
  const py = (y) => height - bottom - (y - y0) / (y1 - y0) * (height - bottom - top);
  const names = [...lines, ...flat].map((line) => line.text).join(", ");
  const svg = drawn("svg", { class: width < WIDTH ? "chart panel" : "chart", viewBox: `0 0 ${width} ${height}`, role: "img",
    "aria-label": `${yLabel} over ${xLabel}: ${names}` });
  for (const tick of ticks(y0, y1)) {
    svg.append(drawn("line", { class: "grid", x1: left, x2: width - right, y1: py(tick), y2: py(tick) }),
      drawn("text", { x: left - 6, y: py(tick) + 4, "text-anchor": "end" }, String(tick)));
  }
  const across = xTicks ?? (points.length ? log ? logTicks(10 ** x0, 10 ** x1) : ticks(x0, x1) : [])
    .filter((tick) => !whole || Number.isInteger(tick)).map((tick) => [tick, String(tick)]);
  for (const [tick, text] of across) {
    svg.append(drawn("text", { x: px(tick), y: height - bottom + 18, "text-anchor": "middle" }, text));
  }
  svg.append(drawn("text", { x: (left + width) / 2, y: height - 6, "text-anchor": "middle" }, xLabel),
    drawn("text", { x: 14, y: height / 2, "text-anchor": "middle", transform: `rotate(-90 14 ${height / 2})` }, yLabel));
  const bands = svg.appendChild(drawn("g")); // below all lines
  for (const { y, colour } of flat) {
    svg.append(drawn("line", { class: "flat", x1: left, x2: width - right, y1: py(y), y2: py(y), stroke: colour,
      "stroke-width": 1.5, "stroke-dasharray": "2 4" }));
  }
  for (const line of lines) {
    const path = (get) => line.points.map((point) => `${px(point.x).toFixed(1)},${py(get(point)).toFixed(1)}`);
    const spread = line.points.filter((point) => point.high > point.low);
    if (bars) {
      for (const point of spread) {
        bands.append(drawn("line", { x1: px(point.x), x2: px(point.x), y1: py(point.low), y2: py(point.high),
          stroke: line.colour, "stroke-width": 1.3 }));
      }
    } else if (spread.length) {
      const band = [...path((p) => p.high), ...path((p) => p.low).reverse()].join(" ");
      bands.append(drawn("polygon", { points: band, fill: line.colour, opacity: 0.14 }));
    }
    svg.append(drawn("polyline", { points: path((p) => p.y).join(" "), fill: "none", stroke: line.colour, "stroke-width": 2,
      "stroke-dasharray": line.dash ?? "" }));
    for (const point of line.points) {
      const at = { cx: px(point.x), cy: py(point.y) };
      const dot = drawn("circle", { ...at, r: line.points.length > 40 ? 2 : 3.5, fill: line.colour });
      dot.append(drawn("title", {}, `${line.text}, ${point.tip}: ${point.y.toPrecision(4)}` +
        (point.high > point.low ? ` ± ${(point.high - point.y).toPrecision(3)}` : "")));
      svg.append(dot);
      if (point.ring) svg.append(drawn("circle", { ...at, r: 7, fill: "none", stroke: line.colour, "stroke-width": 1.5 }));
    }
  }
  return svg;
}

const scoreLabel = (experiment) => `${state.split} ${state.metric}${experiment.metrics[state.metric].percent ? " (%)" : ""}`;
const scaleOf = (experiment) => experiment.metrics[state.metric].percent ? 100 : 1;

function spreadOf(mean, sd, scale) {
  return { y: scale * mean, low: scale * (mean - (sd ?? 0)), high: scale * (mean + (sd ?? 0)) };
}

function curvesFigure(experiment, methods) {
  const scale = scaleOf(experiment);
  const place = { round: null, gigabytes: 2, epsilon: 3 }[state.x];
  const axis = new Map(experiment.axes.map((line) => [`${line[0]} ${line[1]}`, line]));
  const lines = methods.map((method) => {
    const points = experiment.curves
      .filter(([order, point, split, metric]) =>
        order === method.order && point === pointOf(method, state.split) && split === state.split && metric === state.metric)
      .map(([order, , , , round, mean, sd, seeds]) => ({
        round, x: place === null ? round : axis.get(`${order} ${round}`)?.[place], seeds, tip: `round ${round}`,
        ...spreadOf(mean, sd, scale),
      }))
      .filter((point) => point.x !== null && point.x !== undefined)
      .sort((a, b) => a.round - b.round);
    // Trials that stopped early leave fewer seeds to the later rounds.
    const [fewest, most] = [least, greatest].map((extreme) => extreme(points.map((point) => point.seeds)));
    const seeds = most === 1 ? " (single seed)" : fewest < most ? ` (${most} to ${fewest} seeds)` : "";
    const text = label(method) + seeds;
    return { text, points, ...styleOf(experiment.methods.indexOf(method)) };
  }).filter((line) => line.points.length);
  if (!lines.length) return note("No method has such a curve.");
  const silent = (line) => state.x === "gigabytes" && line.points.every((point) => point.x === 0);
  const flat = lines.filter(silent).map((line) =>
    ({ ...line, dash: "2 4", text: `${line.text} (sends nothing): last round`, y: line.points[line.points.length - 1].y }));
  const drawnLines = lines.filter((line) => !silent(line));
  const totals = drawnLines.map((line) => greatest(line.points.map((point) => point.x)));
  const log = state.x === "gigabytes" && greatest(totals) > LOG_RATIO * least(totals);
  if (log) for (const line of drawnLines) line.points = line.points.filter((point) => point.x > 0);
  const xLabel = { round: "round", gigabytes: "GB sent so far, by and to all clients", epsilon: "ε spent so far" }[state.x];
  return element("figure", { id: "chart" },
    linePlot({ lines: drawnLines, flat, xLabel, yLabel: scoreLabel(experiment), log, whole: state.x === "round" }),
    legend([...drawnLines, ...flat]));
}

function sensitivityFigure(experiment, methods) {
  const { keys, values } = experiment.sensitivity;
  const scale = scaleOf(experiment);
  const rows = rowsOf(experiment).filter((row) => !row.unseen && row.metric === state.metric && row.split === state.split &&
    row.rule === state.rule && row.quantity === "mean" && Number.isFinite(row.mean));
  const worded = (value) => value === null ? "none" : String(value);
  const plain = (key) => key.replace(/^algorithm\./, "");
  const group = (method, key) => [method.algorithm, ...keys.flatMap((other, i) => {
    const varies = new Set(experiment.methods.filter((one) => one.algorithm === method.algorithm)
      .map((one) => worded(values[one.order][i]))).size > 1;
    return other === key || !varies ? [] : [`${plain(other)}=${worded(values[method.order][i])}`];
  })].join(" ");
  const panels = keys.map((key, i) => {
    const scored = methods.flatMap((method) => rows
      .filter((row) => row.order === method.order && row.point === pointOf(method, state.split))
      .map((row) => ({ method, row, value: values[method.order][i], text: group(method, key) })));
    const several = (algorithm) =>
      unique(scored.filter((one) => one.method.algorithm === algorithm).map((one) => worded(one.value))).length > 1;
    const shown = scored.filter((one) => several(one.method.algorithm));
    if (!shown.length) return null;
    const numeric = shown.every((one) => typeof one.value === "number");
    const order = unique(shown.map((one) => one.value)).sort((a, b) => numeric ? a - b : worded(a).localeCompare(worded(b)));
    const log = numeric && order[0] > 0 && order[order.length - 1] / order[0] >= LOG_RATIO;
    const all = unique(experiment.methods.map((method) => group(method, key)));
    const lines = unique(shown.map((one) => one.text)).map((text) => ({ text, ...styleOf(all.indexOf(text)),
      points: shown.filter((one) => one.text === text).map(({ method, row, value }) => ({
        x: log ? value : order.indexOf(value), ring: isChosen(method), tip: `${plain(key)}=${worded(value)}`,
        ...spreadOf(row.mean, row.sd, scale),
      })).sort((a, b) => a.x - b.x) }));
    const xTicks = order.map((value, at) => [log ? value : at, worded(value)]);
    return element("div", {}, linePlot({ lines, xLabel: key, yLabel: scoreLabel(experiment), xTicks, log, bars: true, width: 420 }),
      legend(lines));
  }).filter(Boolean);
  return panels.length ? element("figure", { id: "sensitivity", class: "panels" }, ...panels) : null;
}

// Methods by clients. Each cell has its value as a tooltip, and as text where there is room.
function clientsFigure(experiment, methods) {
  const { ids, domains, series } = experiment.clients;
  const { higher } = experiment.metrics[state.metric];
  const scale = scaleOf(experiment);
  const lines = methods.flatMap((method) => series
    .filter(([order, point, split, metric, rule]) => order === method.order && point === pointOf(method, state.split) &&
      split === state.split && metric === state.metric && rule === state.rule)
    .map((one) => ({ method, values: one[5].map((value) => value === null ? null : scale * value) })));
  if (!lines.length) return null;
  const known = lines.flatMap((line) => line.values).filter((value) => value !== null);
  const [low, high] = [least(known), greatest(known)];
  const share = (value) => high === low ? 0.5 : higher ? (value - low) / (high - low) : (high - value) / (high - low);
  const left = Math.min(300, 14 + 6.6 * greatest(lines.map((line) => rowLabel(line.method).length)));
  const [row, right, top] = [24, 62, 4];
  const cell = (WIDTH - left - right) / ids.length;
  const named = ids.length <= 25;
  const several = new Set(domains).size > 1;
  const end = top + row * lines.length;
  const height = Math.max(end, top + 72) + (named ? several ? 34 : 20 : 24);
  const svg = drawn("svg", { class: "chart heat", viewBox: `0 0 ${WIDTH} ${height}`, role: "img",
    "aria-label": `${scoreLabel(experiment)} of ${ids.length} clients and ${lines.length} methods` });
  lines.forEach(({ method, values }, i) => {
    const y = top + i * row;
    svg.append(drawn("text", { x: left - 6, y: y + 16, "text-anchor": "end" }, rowLabel(method)));
    values.forEach((value, j) => {
      if (value === null) return;
      const { colour, ink } = heatColour(share(value));
      const box = drawn("rect", { x: left + j * cell, y, width: cell, height: row, fill: colour });
      const of = domains[j] ? `${ids[j]} (${domains[j]})` : ids[j];
      box.append(drawn("title", {}, `${label(method)}, client ${of}: ${short(value)}`));
      svg.append(box);
      if (named && cell >= 26) {
        const text = Math.abs(value) >= 10 ? value.toFixed(0) : String(+value.toPrecision(2));
        svg.append(drawn("text", { class: "value", x: left + (j + 0.5) * cell, y: y + 16, "text-anchor": "middle",
          style: `fill: ${ink}` }, text));
      }
    });
  });
  const borders = ids.map((_, j) => j).filter((j) => j && domains[j] !== domains[j - 1]);
  if (borders.length && borders.length < ids.length - 1) {
    for (const j of borders) {
      svg.append(drawn("line", { class: "border", x1: left + j * cell, x2: left + j * cell, y1: top, y2: end }));
    }
  }
  if (named) {
    ids.forEach((id, j) => {
      const at = { x: left + (j + 0.5) * cell, "text-anchor": "middle" };
      svg.append(drawn("text", { ...at, y: end + 14 }, String(id)));
      if (several) svg.append(drawn("text", { ...at, y: end + 28, class: "small" }, domains[j].slice(0, Math.max(3, Math.floor(cell / 5.5)))));
    });
  } else {
    svg.append(drawn("text", { x: left + (WIDTH - left - right) / 2, y: end + 16, "text-anchor": "middle" },
      `${ids.length} clients${several ? ", by domain and number" : ""}`));
  }
  for (let step = 0; step < 24; step++) { // the scale of colours, its better end at the top
    svg.append(drawn("rect", { x: WIDTH - right + 10, y: top + step * 3, width: 10, height: 3.2, fill: heatColour(1 - step / 23).colour }));
  }
  const [best, worst] = higher ? [high, low] : [low, high];
  svg.append(drawn("text", { x: WIDTH - right + 24, y: top + 10, class: "small" }, short(best)),
    drawn("text", { x: WIDTH - right + 24, y: top + 72, class: "small" }, short(worst)));
  return element("figure", { id: "clients" }, svg);
}

function partitionPanel(partition) {
  const { clients, domains, classes, counts, digest, seed } = partition;
  const wide = clients.length > MOST_BUBBLES;
  const [width, height, left, bottom, top] = [wide ? WIDTH : 420, 280, 40, 40, 8];
  const cell = { x: (width - left - 8) / clients.length, y: (height - bottom - top) / classes };
  const px = (client) => left + (client + 0.5) * cell.x;
  const py = (label) => height - bottom - (label + 0.5) * cell.y;
  const names = unique(domains).filter(Boolean);
  const svg = drawn("svg", { class: wide ? "chart" : "chart panel", viewBox: `0 0 ${width} ${height}`, role: "img",
    "aria-label": `examples of ${classes} classes at ${clients.length} clients` });
  const cells = [];
  for (let i = 0; i < counts.length; i += 3) cells.push({ client: counts[i], label: counts[i + 1], count: counts[i + 2] });
  const most = greatest(cells.map((one) => one.count));
  const bubbles = Math.max(clients.length, classes) <= MOST_BUBBLES;
  if (bubbles) {
    for (const { client, label, count } of cells) {
      const colour = names.length > 1 ? categoryColour(names.indexOf(domains[client]), names.length) : COLOURS[0];
      const radius = Math.max(1, Math.sqrt(count / most) * 10);
      const dot = drawn("circle", { cx: px(client), cy: py(label), r: radius, fill: colour, opacity: 0.75 });
      const of = domains[client] ? `${clients[client]} (${domains[client]})` : clients[client];
      dot.append(drawn("title", {}, `client ${of}, class ${label}: ${count} examples`));
      svg.append(dot);
    }
  } else { // one path for each of 20 colours, since there may be many thousand cells
    const paths = new Map();
    for (const { client, label, count } of cells) {
      const level = Math.round(19 * count / most);
      const move = `M${(px(client) - cell.x / 2).toFixed(2)} ${py(label).toFixed(2)}h${cell.x.toFixed(2)}`;
      paths.set(level, (paths.get(level) ?? "") + move);
    }
    for (const [level, path] of paths) {
      svg.append(drawn("path", { d: path, stroke: heatColour(level / 19).colour, "stroke-width": cell.y, fill: "none" }));
    }
  }
  const step = (count) => [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000].find((size) => count / size <= 12) ?? 5000;
  for (let i = 0; i < clients.length; i += step(clients.length)) {
    svg.append(drawn("text", { x: px(i), y: height - bottom + 16, "text-anchor": "middle", class: "small" }, String(clients[i])));
  }
  for (let i = 0; i < classes; i += step(classes)) {
    svg.append(drawn("text", { x: left - 6, y: py(i) + 4, "text-anchor": "end", class: "small" }, String(i)));
  }
  svg.append(drawn("text", { x: (left + width) / 2, y: height - 8, "text-anchor": "middle" }, "client"),
    drawn("text", { x: 12, y: height / 2, "text-anchor": "middle", transform: `rotate(-90 12 ${height / 2})` }, "class"));
  const scale = bubbles ? `area: examples, at most ${most}` : `yellow: ${most} examples; none where it is blank`;
  return element("div", { class: "partition" },
    element("figcaption", {}, `partition ${digest}${seed === null ? "" : `, seed ${seed}`}; ${scale}`), svg,
    bubbles && names.length > 1 ? legend(names.map((text, i) => ({ text, colour: categoryColour(i, names.length) }))) : null);
}

function partitionsFigure(experiment, methods) {
  const orders = new Set(methods.map((method) => method.order));
  const fit = experiment.partitions.shown.filter((one) => one.orders.some((order) => orders.has(order)));
  if (!fit.length) return null;
  return element("figure", { id: "partitions", class: "panels" }, ...fit.slice(0, MOST_PARTITIONS).map(partitionPanel),
    fit.length > MOST_PARTITIONS ? note(`${fit.length - MOST_PARTITIONS} more partitions are not drawn.`) : null);
}

function mapPanel(map, place, names, title) {
  const size = 400;
  const svg = drawn("svg", { class: "chart panel map", viewBox: `-12 -12 ${size + 24} ${size + 24}`, role: "img", "aria-label": title });
  const paths = names.map(() => "");
  for (let i = 0; i < map.points.length; i += 4) {
    const [x, y] = [map.points[i], 999 - map.points[i + 1]].map((value) => (value * size / 999).toFixed(1));
    paths[map.points[i + place]] += `M${x} ${y}h0`;
  }
  const entries = names.map((text, i) => ({ text, colour: categoryColour(i, names.length) }));
  entries.forEach(({ text, colour }, i) => {
    const path = drawn("path", { d: paths[i], stroke: colour, "stroke-width": 5, "stroke-linecap": "round", opacity: 0.7 });
    path.append(drawn("title", {}, text));
    svg.append(path);
  });
  return element("div", {}, element("figcaption", {}, title), svg, names.length <= 20 ? legend(entries) : null);
}

function mapsFigure(experiment, methods) {
  const fit = methods.flatMap((method) => experiment.maps.shown
    .filter((map) => map.order === method.order && map.point === pointOf(method, state.split) && map.split === state.split)
    .map((map) => ({ method, map })));
  if (!fit.length) return null;
  return element("figure", { id: "maps", class: "panels" }, ...fit.flatMap(({ method, map }) => {
    const name = `${label(method)}, ${map.point} model, ${map.layer}, seed ${map.seed}, round ${map.round}`;
    return [mapPanel(map, 2, map.domains.map((text) => text || "no domain"), `${name}: by domain`),
      mapPanel(map, 3, map.labels, `${name}: by class`)];
  }));
}

function timeFigure(experiment, methods) {
  const { parts, rows } = experiment.seconds;
  const seconds = new Map(rows.map(([order, ...numbers]) => [order, numbers.map((number) => number ?? 0)]));
  const shown = methods.filter((method) => seconds.has(method.order));
  if (!shown.length) return null;
  const total = (method) => seconds.get(method.order).reduce((a, b) => a + b, 0);
  const left = Math.min(300, 14 + 6.6 * greatest(shown.map((method) => rowLabel(method).length)));
  const [row, right, top, bottom] = [26, 70, 4, 40];
  const height = top + row * shown.length + bottom;
  const most = greatest(shown.map(total)) || 1;
  const px = (value) => left + value / most * (WIDTH - left - right);
  const svg = drawn("svg", { class: "chart", viewBox: `0 0 ${WIDTH} ${height}`, role: "img",
    "aria-label": `seconds per round of ${shown.length} methods by part` });
  for (const tick of ticks(0, most)) {
    svg.append(drawn("line", { class: "grid", x1: px(tick), x2: px(tick), y1: top, y2: height - bottom }),
      drawn("text", { x: px(tick), y: height - bottom + 16, "text-anchor": "middle" }, String(tick)));
  }
  shown.forEach((method, i) => {
    const y = top + i * row;
    let start = 0;
    svg.append(drawn("text", { x: left - 6, y: y + 17, "text-anchor": "end" }, rowLabel(method)));
    seconds.get(method.order).forEach((value, part) => {
      const bar = drawn("rect", { x: px(start), y: y + 3, width: px(start + value) - px(start), height: row - 6,
        fill: COLOURS[part % COLOURS.length] });
      bar.append(drawn("title", {}, `${label(method)}, ${parts[part]}: ${short(value)} s`));
      svg.append(bar);
      start += value;
    });
    svg.append(drawn("text", { x: px(start) + 6, y: y + 17 }, `${short(+start.toPrecision(3))} s`));
  });
  svg.append(drawn("text", { x: (left + WIDTH - right) / 2, y: height - 6, "text-anchor": "middle" }, "wall-clock seconds per round"));
  return element("figure", { id: "time" }, svg,
    legend(parts.map((text, i) => ({ text, colour: COLOURS[i % COLOURS.length] }))));
}

// Every chart with a heading and a line on what it shows; what has no data is left out.
function chartSections(experiment, methods) {
  const caption = data.rules[state.rule].replace("{criterion}", experiment.criterion);
  const spread = experiment.repetitions.replace(/^mean ± sd/, "mean ± 1 sd");
  const section = (title, text, figure, left = null) => figure || left ? element("section", {}, element("h2", {}, title),
    figure ? note(text) : null, figure, left ? note(left) : null) : null;
  const { clients, partitions, maps } = experiment;
  const others = clients.partitions > 1 ? "; each seed has its own partition, so a client holds other data in each" : "";
  const command = (kind) => `rayfed report ${data.folder} --experiment ${experiment.name} --plot ${kind}.png --kind ${kind}`;
  const clientsChart = clientsFigure(experiment, methods);
  const noMap = maps.shown.length ? `No map at this choice; there are maps of ${unique(maps.shown.map((map) =>
    `the ${map.point} model on ${map.split} data`)).join(", ")}.` : null;
  const mapsChart = mapsFigure(experiment, methods);
  return [
    section("Curves", `Mean over clients; ${spread}.`, curvesFigure(experiment, methods)),
    section("Sensitivity", `Mean over clients, ${caption}; ${spread}. Ring: chosen by validation.`,
      sensitivityFigure(experiment, methods)),
    section("Clients", `${scoreLabel(experiment)} of each client, ${caption}; mean over seeds${others}.`, clientsChart,
      !clientsChart && clients.omitted ? `There are too many clients for all values to be on this page: ${command("clients")}` : null),
    section("Partitions", "Examples for training and validation by client and class. Metric, split, model and round make no difference.",
      partitionsFigure(experiment, methods),
      partitions.omitted ? `Too large for this page: ${partitions.omitted} partitions: ${command("partition")}` : null),
    section("Maps of representations", "The last map of each method's first seed, by t-SNE. Metric and round make no difference.",
      mapsChart, maps.omitted ? `Too large for this page: ${maps.omitted} maps: ${command("tsne")}` : mapsChart ? null : noMap),
    section("Where the time went", "Mean over rounds and seeds; setup and the final stage are shared among the rounds. " +
      "Metric, split, model and round make no difference.", timeFigure(experiment, methods)),
  ].filter(Boolean);
}
