// Tables of results, as rayfed.results.result_table makes them.

function numberText(value, percent) {
  if (!Number.isFinite(value)) return Number.isNaN(value) ? "NaN" : value > 0 ? "∞" : "−∞";
  if (percent) return (100 * value).toFixed(2);
  const digits = value === 0 ? 4 : Math.min(6, Math.max(0, 3 - Math.floor(Math.log10(Math.abs(value)))));
  return value.toFixed(digits);
}

// A table of methods and domains. Columns that repeat another are left out, as in rayfed.results.result_table.
function resultTable(experiment, methods, rows, metric) {
  const { percent, higher } = experiment.metrics[metric];
  const byMethod = new Map(methods.map((method) => [method.order, new Map()]));
  for (const row of rows) byMethod.get(row.order)?.set(row.quantity, row);
  const shown = methods.filter((method) => byMethod.get(method.order).has("mean"));
  if (!shown.length) return element("p", { class: "note" }, "No method has such values.");
  const present = unique(rows.map((row) => row.quantity));
  const everyDomain = present.filter((name) => name.startsWith("domain:"))
    .sort((a, b) => a.localeCompare(b, undefined, { numeric: true }));
  const domains = everyDomain.length > FEW_CLIENTS ? [] : everyDomain;
  const text = (method, quantity) => {
    const cell = byMethod.get(method.order).get(quantity);
    return cell ? numberText(cell.mean, percent) + (cell.sd === null ? "" : ` ± ${numberText2(cell, percent)}`) : "-";
  };
  let columns = [...domains, ...Object.keys(QUANTITIES).filter((name) => present.includes(name))];
  const same = (one, other) => shown.every((method) => text(method, one) === text(method, other));
  if (columns.some((name) => name !== "worst" && same("worst", name))) columns = columns.filter((c) => c !== "worst");
  if (domains.length === 1 && same("mean", domains[0])) columns = columns.filter((c) => c !== "mean");
  const seeds = unique(shown.map((method) => byMethod.get(method.order).get("mean").seeds));
  const several = new Map();
  for (const method of experiment.methods) several.set(method.algorithm, (several.get(method.algorithm) || 0) + 1);
  const hasHyperparameters = shown.some((method) => method.hyperparameters);

  const value = (method, column) => byMethod.get(method.order).get(column)?.mean;
  const lines = [...shown];
  if (state.sort) {
    const [column, sign] = state.sort;
    const worst = higher ? -Infinity : Infinity;
    lines.sort((a, b) => column === "algorithm" ? sign * label(a).localeCompare(label(b))
      : sign * ((value(b, column) ?? worst) - (value(a, column) ?? worst)) * (higher ? 1 : -1));
  }
  const ranks = new Map(columns.map((column) => [column, unique(shown.map((method) => value(method, column))
    .filter((number) => number !== undefined).sort((a, b) => a === b ? 0 : higher ? b - a : a - b)
    .map((number) => numberText(number, percent)))]));
  const sorter = (column) => () => {
    state.sort = state.sort && state.sort[0] === column ? [column, -state.sort[1]] : [column, 1];
    render();
  };
  const head = (name, column, kind = "") =>
    element("th", { class: `sortable ${kind}`, scope: "col", title: "sort", onclick: sorter(column) }, name);
  const header = element("tr", {}, head("algorithm", "algorithm", "text"),
    hasHyperparameters ? element("th", { class: "text", scope: "col" }, "hyperparameters") : null,
    ...columns.map((column) => head(QUANTITIES[column] ?? column.slice("domain:".length), column)),
    seeds.length > 1 ? element("th", { scope: "col" }, "seeds") : null);
  const body = lines.map((method) => {
    const mark = isChosen(method) && several.get(method.algorithm) > 1 ? " †" : "";
    return element("tr", {}, element("td", { class: "text" }, method.algorithm),
      hasHyperparameters ? element("td", { class: "text" }, method.hyperparameters + mark) : null,
      ...columns.map((column) => {
        const cell = byMethod.get(method.order).get(column);
        if (!cell) return element("td", {}, "-");
        const number = numberText(cell.mean, percent);
        const order = ranks.get(column);
        const rank = order.length < 2 ? "" : number === order[0] ? "best" : number === order[1] ? "second" : "";
        const spread = cell.sd === null ? null : element("span", { class: "sd" }, ` ± ${numberText2(cell, percent)}`);
        return element("td", { class: rank }, number, spread);
      }),
      seeds.length > 1 ? element("td", {}, String(byMethod.get(method.order).get("mean").seeds)) : null);
  });
  const fewer = columns.filter((column) => shown.some((method) => {
    const cells = byMethod.get(method.order);
    return cells.has(column) && cells.get(column).seeds < cells.get("mean").seeds;
  })).map((column) => {
    const counts = shown.map((method) => byMethod.get(method.order).get(column)?.seeds).filter(Boolean);
    const [least, most] = [Math.min(...counts), Math.max(...counts)];
    return `${QUANTITIES[column] ?? column.slice("domain:".length)} ${least === most ? least : `${least} to ${most}`}`;
  });
  return element("div", { class: "scroll" },
    element("table", { class: "results" }, element("thead", {}, header), element("tbody", {}, ...body)),
    fewer.length ? element("p", { class: "note" }, `Columns with values of fewer seeds: ${fewer.join(", ")}.`) : null);
}

// The standard deviation with the decimals of the mean
function numberText2(cell, percent) {
  const decimals = (numberText(cell.mean, percent).split(".")[1] ?? "").length;
  return ((percent ? 100 : 1) * cell.sd).toFixed(decimals);
}

function plainTable(columns, textColumns, rows) {
  const kind = (index) => textColumns.includes(index) ? "text" : "";
  return element("div", { class: "scroll" }, element("table", {},
    element("thead", {}, element("tr", {}, ...columns.map((name, i) => element("th", { class: kind(i), scope: "col" }, name)))),
    element("tbody", {}, ...rows.map((row) =>
      element("tr", {}, ...row.map((cell, i) => element("td", { class: kind(i) }, cell)))))));
}

// Whether rounds of the scores that are shown were scored on different clients, as a list of one note or none.
function differentClients(experiment, methods) {
  const points = methods.map((method) => pointOf(method, state.split));
  const differ = experiment.different.scores.some(([point, split, metric]) =>
    split === state.split && metric === state.metric && points.includes(point));
  return differ ? [experiment.different.note] : [];
}

function tableSections(experiment, methods) {
  const rows = rowsOf(experiment).filter((row) => row.metric === state.metric);
  const byOrder = new Map(experiment.methods.map((method) => [method.order, method]));
  const percent = experiment.metrics[state.metric].percent ? ", %" : "";
  const part = (split, rule) => rows.filter((row) => !row.unseen && row.split === split && row.rule === rule &&
    row.point === pointOf(byOrder.get(row.order), split));
  const caption = (rule) => data.rules[rule].replace("{criterion}", experiment.criterion);
  const parts = [element("h2", {}, `${state.split} ${state.metric}${percent}`),
    element("p", { class: "note" }, `${caption(state.rule)}; ${experiment.repetitions}. AVG: mean over clients. ` +
      (part(state.split, state.rule).some((row) => row.quantity === "worst10")
        ? "best (worst) 10 %: mean over the best (worst) tenth of the clients. " : "") +
      "worst: the worst client. Bold: best; underlined: second. †: chosen by validation."),
    resultTable(experiment, methods, part(state.split, state.rule), state.metric)];
  if (state.split !== "ood" && rows.some((row) => row.split === "ood" && !row.unseen)) {
    const rule = rows.some((row) => row.split === "ood" && row.rule === state.rule) ? state.rule : "final";
    parts.push(element("h2", {}, `Out of domain: ${state.metric}${percent} on domains that no client holds`),
      element("p", { class: "note" }, `${caption(rule)}; the global model, or where there is none the mean over the clients' models.`),
      resultTable(experiment, methods, part("ood", rule), state.metric));
  }
  for (const point of ["downloaded", "adapted"]) {
    const unseen = rows.filter((row) => row.unseen && row.split === state.split && row.rule === "final" && row.point === point);
    if (unseen.length) {
      parts.push(element("h2", {}, `Unseen clients, ${point} model: ${state.split} ${state.metric}${percent}`),
        resultTable(experiment, methods, unseen, state.metric));
    }
  }
  return parts;
}
