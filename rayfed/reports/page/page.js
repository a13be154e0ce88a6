// Shows the chosen view, hides the methods that are filtered out in tables and charts, and draws charts when they are seen.

const charts = JSON.parse(document.getElementById("charts").textContent);
const field = (id) => document.getElementById(id);
const drawn = new Map(); // by figure, the running Vega view and all methods that its chart can show
const texts = getComputedStyle(document.documentElement);
const colour = (name) => texts.getPropertyValue(name).trim();
const ink = { labelColor: colour("--ink"), titleColor: colour("--ink") };
const config = { background: "transparent", axis: { ...ink, gridColor: colour("--line") }, legend: ink,
  header: ink, title: { color: colour("--ink") } };

function fitted(spec, room) {
  if (!spec.concat) return { ...spec, width: Math.min(spec.width, room) };
  const columns = room < 600 ? 1 : spec.columns;
  const width = Math.min(spec.concat[0].width, room / columns - 90);
  const panels = spec.concat.map((panel) => ({ ...panel, width, height: panel.height === panel.width ? width : panel.height }));
  return { ...spec, columns, concat: panels };
}

function methodsOf(article) {
  return new Set([...article.querySelectorAll("tr[data-method]:not([hidden])")].map((row) => row.dataset.method));
}

async function draw(figure, methods) {
  if (!drawn.has(figure)) {
    const spec = charts[figure.dataset.chart];
    const every = spec.usermeta?.methods;
    drawn.set(figure, null);
    const options = { renderer: "svg", config,
      actions: { export: true, source: false, compiled: false, editor: false } };
    const { view } = await vegaEmbed(figure.lastElementChild, fitted(spec, figure.clientWidth), options);
    drawn.set(figure, { view, every });
  }
  const chart = drawn.get(figure);
  if (chart?.every) chart.view.signal("shown", chart.every.filter((method) => methods.has(method))).resize().run();
}

const distinct = (values) => [...new Set(values)];

function offer(id, values, first) {
  const select = field(id);
  const value = values.includes(select.value) ? select.value : values.includes(first) ? first : values[0];
  select.replaceChildren(...values.map((text) => new Option(text, text, false, text === value)));
  select.parentElement.hidden = values.length < 2;
  return value;
}

function show() {
  const articles = [...document.querySelectorAll("article")];
  const experiment = offer("experiment", articles.map((article) => article.dataset.experiment));
  const article = articles.find((one) => one.dataset.experiment === experiment);
  for (const one of articles) one.hidden = one !== article;
  const views = [...article.querySelectorAll(".view")];
  const metric = offer("metric", distinct(views.map((view) => view.dataset.metric)));
  const split = offer("split", views.filter((view) => view.dataset.metric === metric).map((view) => view.dataset.split));
  for (const view of views) view.hidden = view.dataset.metric !== metric || view.dataset.split !== split;
  const words = field("find").value.toLowerCase().split(/\s+/).filter(Boolean);
  for (const row of article.querySelectorAll("[data-method]")) {
    const isChosen = !field("chosen").checked || row.dataset.chosen !== "false";
    row.hidden = !isChosen || !words.every((word) => row.dataset.method.toLowerCase().includes(word));
  }
  const methods = methodsOf(views.find((view) => !view.hidden) ?? article);
  for (const figure of article.querySelectorAll("figure[data-chart]")) {
    if (!figure.closest("[hidden]")) draw(figure, methods);
  }
}

// A click on a header sorts the rows of its table by that column, and another one the other way round.
function sort(header) {
  const body = header.closest("table").tBodies[0];
  const value = (row) => {
    const cell = row.cells[header.cellIndex];
    return Number(cell?.dataset.value || NaN);
  };
  const sign = header.dataset.sign = header.dataset.sign === "-1" ? "1" : "-1";
  const order = header.cellIndex === 0 ? (a, b) => a.cells[0].textContent.localeCompare(b.cells[0].textContent)
    : (a, b) => (Number.isNaN(value(a)) - Number.isNaN(value(b))) * sign || value(a) - value(b) || 0;
  body.append(...[...body.rows].sort((a, b) => sign * order(a, b)));
}

for (const header of document.querySelectorAll("table.results thead th")) {
  header.addEventListener("click", () => sort(header));
}
field("chosen").checked = document.querySelector("article")?.dataset.few === "true";
field("filters").addEventListener("input", show);
field("filters").addEventListener("submit", (event) => event.preventDefault());
show();
