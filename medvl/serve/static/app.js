// The page: sends the chosen file with every question, and shows what the models answer.

import { Viewer } from "./viewer.js";
import { PRESETS, VolumeViewer } from "./volume.js";

const find = (id) => document.getElementById(id);
const percent = (share) => `${(100 * share).toFixed(share < 0.0995 && share > 0 ? 1 : 0)} %`;
const RETRIES = 4;

let served = null;
let viewer = null;
let files = []; // one image, or all files of a volume
let version = 0; // of files, frame and window: answers about an earlier one are dropped
let token = new URLSearchParams(location.hash.slice(1)).get("token") || sessionStorage.getItem("token") || "";
if (location.hash) history.replaceState(null, "", location.pathname); // the token is not left in the address

function element(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

let running = 0;
function say(text) {
  find("status").textContent = text;
}
function complain(text) {
  find("alert").textContent = text;
  find("alert").hidden = !text;
}

class Failure extends Error {}

async function call(path, form, retries = RETRIES) {
  const headers = token ? { authorization: `Bearer ${token}` } : {};
  let response;
  try {
    response = await fetch(`/api/${path}`, form ? { method: "POST", body: form, headers } : { headers });
  } catch {
    throw new Failure("The server does not answer. Is it still running?");
  }
  if (response.status === 401) {
    await askToken();
    return call(path, form, retries);
  }
  const answer = await response.json().catch(() => ({ error: { message: `status ${response.status}` } }));
  if (response.status === 429 && answer.error.code === "busy" && retries > 0) {
    say("The server is busy; waiting …");
    const wait = 1000 * Number(response.headers.get("retry-after") || 2) * (1 + Math.random());
    await new Promise((resolve) => setTimeout(resolve, wait));
    return call(path, form, retries - 1);
  }
  if (!response.ok) throw new Failure(answer.error.message);
  return answer;
}

function askToken() {
  const dialog = find("token-dialog");
  if (!dialog.open) dialog.showModal();
  return new Promise((resolve) => dialog.addEventListener("close", () => {
    token = find("token").value;
    sessionStorage.setItem("token", token);
    resolve();
  }, { once: true }));
}

const ofVolumes = () => served.reads === "volume";

const windowed = () => find("windowed").checked && viewer.window
  ? { center: Number(find("center").value), width: Number(find("width").value) } : null;

function request(texts = []) {
  const form = new FormData();
  for (const file of files) form.append("image", file, "image"); // the names of files stay here
  if (!ofVolumes()) form.set("frame", String(Number(find("frame").value) - 1));
  const window = windowed();
  if (window) {
    form.set("center", String(window.center));
    form.set("width", String(window.width));
  }
  for (const text of texts) form.append("text", text);
  return form;
}

// Ask the server about the image of now; undefined when the image has changed meanwhile, or on an error.
async function ask(path, texts, doing) {
  if (!files.length) {
    complain("Choose an image first.");
    find("file").focus();
    return undefined;
  }
  const mine = version;
  complain("");
  say(doing);
  running += 1;
  find("status").classList.add("busy");
  try {
    const answer = await call(path, request(texts));
    if (mine !== version) return undefined;
    say("");
    return answer;
  } catch (error) {
    if (!(error instanceof Failure)) throw error;
    if (mine === version) {
      complain(error.message);
      say("");
    }
    return undefined;
  } finally {
    running -= 1;
    find("status").classList.toggle("busy", running > 0);
  }
}

async function open(chosen) {
  if (!chosen.length) return;
  const size = [...chosen].reduce((sum, file) => sum + file.size, 0);
  if (size > served.max_bytes) {
    complain(`The ${chosen.length > 1 ? "files have" : "file has"} ${(size / 1e6).toFixed(1)} MB, over the limit of ${served.max_bytes / 1e6} MB.`);
    return;
  }
  files = ofVolumes() ? [...chosen] : [chosen[0]];
  find("frame").value = "1";
  find("windowed").checked = false;
  if (await load()) await score();
}

// The radiograph that the server draws for its demo model.
async function openExample() {
  const headers = token ? { authorization: `Bearer ${token}` } : {};
  const response = await fetch("/api/example", { headers }).catch(() => undefined);
  if (response?.ok) await open([new File([await response.blob()], "example.png")]);
  else complain("The server does not answer. Is it still running?");
}

async function load() {
  version += 1;
  for (const id of ["scores", "map-notes", "answers", "reports", "neighbor-list"]) find(id).replaceChildren();
  const view = await ask("view", [], "Reading the image …");
  if (!view) {
    find("viewer").hidden = true;
    find("drop").classList.remove("small");
    return false;
  }
  find("viewer").hidden = false;
  find("drop").classList.add("small");
  document.querySelector("#drop .big").textContent = ofVolumes() ? "Another volume:" : "Another image:";
  viewer.show(view);
  showFacts(view);
  setSliders(view.window);
  hideMap();
  return true;
}

function showVolumeFacts(view) {
  const dropped = Object.entries(view.dropped).map(([kind, count]) => `${count} ${kind} left out`);
  const size = `${view.slices} slices of ${view.columns} × ${view.rows} pixels`;
  const spacing = `${view.spacing.map((step) => Number(step.toFixed(2))).join(" × ")} mm`;
  find("facts").textContent = [view.format, view.header.modality, size, spacing, ...dropped].filter(Boolean).join(" · ");
  find("frame-row").hidden = view.depth < 2;
  find("frame").max = String(view.depth);
  showSlice();
}

function showSlice() {
  find("frame").value = String(viewer.slice + 1);
  find("frame-value").textContent = `${viewer.place} of ${viewer.view.slices}`;
}

function showFacts(view) {
  if (ofVolumes()) {
    showVolumeFacts(view);
    return;
  }
  const names = ["modality", "view_position", "body_part", "laterality", "photometric_interpretation"];
  const fields = names.map((name) => view.header[name]).filter(Boolean);
  find("facts").textContent = [view.format, ...fields, `${view.columns} × ${view.rows} pixels`].join(" · ");
  find("other").hidden = !view.warning;
  find("other").textContent = view.warning ?? "";
  find("burned").hidden = view.burned_in !== true;
  find("frame-row").hidden = view.frames < 2;
  find("frame").max = String(view.frames);
  find("frame-value").textContent = `${find("frame").value} of ${view.frames}`;
}

function setSliders(window) {
  find("window").hidden = !window;
  if (!window) return;
  const range = window.hounsfield ? 2000 : Math.max(window.high - window.low, window.width, 1e-6);
  if (window.hounsfield) window = { ...window, low: -1024, high: 1500 };
  if (ofVolumes()) find("presets").hidden = !window.hounsfield;
  Object.assign(find("center"), { min: Math.min(window.low, window.center - window.width / 2), max: Math.max(window.high, window.center + window.width / 2) });
  Object.assign(find("width"), { min: range / 256, max: 2 * range });
  for (const name of ["center", "width"]) {
    find(name).step = range > 100 ? "1" : "any";
    find(name).value = String(window[name]);
  }
  showWindow();
}

function showWindow() {
  for (const name of ["center", "width"]) {
    const number = Number(find(name).value);
    find(`${name}-value`).textContent = Math.abs(number) >= 100 ? number.toFixed(0) : number.toPrecision(3);
  }
}

function moveWindow() {
  showWindow();
  viewer.paintWindow({ center: Number(find("center").value), width: Number(find("width").value) });
  if (find("windowed").checked) outdate();
}

function outdate() {
  version += 1;
  if (find("scores").children.length) say("The models have not seen this window yet: score again.");
}

const lines = () => find("findings").value.split("\n").map((line) => line.trim()).filter(Boolean);

async function score() {
  if (!served.models.some((model) => model.abilities.scores)) return;
  const used = windowed();
  const answer = await ask("scores", lines(), "Scoring the findings …");
  if (!answer) return;
  const models = having("scores", answer.models);
  const rows = merge(models);
  find("scores").replaceChildren(scoreTable(models, rows, used));
  if (rows.length) say(`Scored ${rows.length} ${rows.length === 1 ? "text" : "texts"}. ${spoken(rows[0])}`);
}

const shown = (result) => (result.probability === null ? result.score : result.probability);

function spoken({ text, results }) {
  const result = results.find(Boolean);
  return `Highest: ${text}, ${result.probability === null ? `score ${result.score.toFixed(2)}, uncalibrated` : percent(result.probability)}.`;
}

// One row for each text with the result of every model, null where it has none. The highest of the first model come
// first, and calibrated ones before others, with which they cannot be compared.
function merge(models) {
  const rows = new Map();
  models.forEach((model, number) => {
    for (const result of model.result || []) {
      if (!rows.has(result.text)) rows.set(result.text, models.map(() => null));
      rows.get(result.text)[number] = result;
    }
  });
  const rank = (row) => [row.results.findIndex(Boolean), row.results.find(Boolean).probability === null ? 1 : 0, -shown(row.results.find(Boolean))];
  const listed = [...rows].map(([text, results]) => ({ text, results }));
  return listed.map((row) => [rank(row), row])
    .sort(([one], [other]) => one[0] - other[0] || one[1] - other[1] || one[2] - other[2])
    .map(([, row]) => row);
}

// Results of the models that have an ability; those of others are only errors.
const having = (ability, models) => models.filter((_, number) => served.models[number].abilities[ability]);

function scoreTable(models, rows, used) {
  const able = served.models.some((model) => model.abilities.heatmap);
  const whole = ofVolumes() ? "the whole volume" : "the image as its file renders it";
  const seen = used ? `the image in the window ${used.center.toFixed(0)} / ${used.width.toFixed(0)}` : whole;
  const calibrated = rows.every(({ results }) => results.every((result) => !result || result.probability !== null));
  const head = models.map((model) => element("th", { scope: "col" }, served.models.length > 1 ? model.title : calibrated ? "Probability" : "Score"));
  const body = rows.map(({ text, results }) => {
    const button = element("button", { type: "button", "aria-pressed": "false", "aria-label": `Show the map of ${text}` }, "Map");
    button.addEventListener("click", () => showMap(text, button));
    const cells = results.map((result) => (result ? scoreCell(result) : element("td", { class: "hint" }, "–")));
    return element("tr", {}, element("th", { scope: "row" }, text), ...cells, ...(able ? [element("td", { class: "action" }, button)] : []));
  });
  const failed = models.filter((model) => model.error).map((model) =>
    element("p", { class: "warning" }, models.length > 1 ? `${model.title}: ${model.error.message}` : model.error.message));
  const table = element("table", {},
    element("caption", {}, `Scores of ${seen}. Solid bars are probabilities among patients like those of the calibration; hatched bars are scores without a calibration.`),
    element("thead", {}, element("tr", {}, element("th", { scope: "col" }, "Finding"), ...head, ...(able ? [element("th", { scope: "col" }, "Where")] : []))),
    element("tbody", {}, ...body));
  return element("div", { class: models.length > 1 ? "scroll pair" : "scroll" }, ...failed, ...(rows.length ? [table] : []));
}

function scoreCell(row) {
  const bar = element("i");
  bar.style.width = `${100 * shown(row)}%`;
  const meter = element("span", { class: "meter", "aria-hidden": "true" }, bar);
  const against = row.positive.length ? `For: ${row.positive.join(" ")} Against: ${row.negative.join(" ")}` : "";
  if (row.probability === null) {
    const reason = row.uncalibrated ? `Uncalibrated: ${row.uncalibrated}. ` : "";
    return element("td", { class: "number raw", title: reason + against }, row.score.toFixed(2), " ", element("small", {}, "uncalibrated"), meter);
  }
  const basis = `Calibrated on ${row.images} images, ${row.positives} with the finding. ${against}`;
  return element("td", { class: "number", title: basis }, percent(row.probability), meter);
}

async function showMap(text, button) {
  const answer = await ask("heatmap", [text], `Computing the map of “${text}” …`);
  if (!answer) return;
  hideMap();
  if (button) button.setAttribute("aria-pressed", "true");
  const failed = [];
  answer.models.forEach((model, number) => {
    if (model.result) viewer.setMap(number, model.result, text);
    else if (served.models[number].abilities.heatmap) failed.push(element("p", { class: "warning" }, `${model.title}: ${model.error.message}`));
  });
  find("map-notes").replaceChildren(...failed);
  if (ofVolumes()) showSlice();
  find("opacity").disabled = find("clear-map").disabled = !answer.models.some((model) => model.result);
  const mapped = answer.models.filter((model) => model.result);
  const places = mapped.map((model) => `${mapped.length > 1 ? `${model.title} ` : ""}highest in the ${model.result.place}`);
  if (places.length) say(`Map of “${text}”: ${places.join("; ")}.`); // the captions have the values
  if (find("panels").getBoundingClientRect().bottom < 120) find("panels").scrollIntoView(); // on a phone it is far above
}

function hideMap() {
  viewer.clearMaps();
  find("opacity").disabled = find("clear-map").disabled = true;
  for (const pressed of document.querySelectorAll("[aria-pressed=true]")) pressed.setAttribute("aria-pressed", "false");
}

function articles(ability, models, render) {
  return element("div", { class: `answers ${ability}` }, ...having(ability, models).map((model) => element("article", {},
    ...(models.length > 1 ? [element("h3", {}, model.title)] : []),
    ...(model.result ? render(model.result) : [element("p", { class: "hint" }, model.error.message)]))));
}

async function answerQuestion() {
  const question = find("question").value.trim();
  if (!question) return;
  const answer = await ask("answer", [question], "Looking for an answer …");
  if (!answer) return;
  find("answers").replaceChildren(articles("answer", answer.models, (result) => [
    element("p", { class: "text" }, result.answer),
    element("p", { class: "hint" }, `The model's own score: ${result.score.toFixed(2)}, uncalibrated.`)]));
  const first = answer.models.find((model) => model.result);
  if (first) say(`Answer: ${first.result.answer}.`);
}

async function writeReport() {
  const answer = await ask("report", [], "Writing a report …");
  if (!answer) return;
  find("reports").replaceChildren(articles("report", answer.models, (result) => [
    element("p", { class: "text" }, result.report || "(empty)"),
    element("p", { class: "hint" }, result.ended ? "Generated text. It may be wrong." : "Generated text, cut at the longest length. It may be wrong.")]));
  say("The report is written.");
}

async function findNeighbors() {
  const answer = await ask("neighbors", [], "Searching the gallery …");
  if (!answer) return;
  find("neighbor-list").replaceChildren(articles("neighbors", answer.models, (result) => [element("ol", { class: "cards" }, ...result.map(card))]));
  say("The similar images are shown.");
}

function card(item) {
  const labels = item.labels.join(", ") || "no positive label";
  const image = element("img", { src: item.image, alt: `Image ${item.position} of the gallery: ${labels}` });
  const text = item.text ? [element("details", {}, element("summary", {}, "Text"), item.text)] : [];
  return element("li", {}, image, element("b", {}, item.cosine.toFixed(3)), ` ${labels}`, ...text);
}

function connect() {
  const drop = find("drop");
  find("file").addEventListener("change", (event) => open(event.target.files));
  for (const name of ["dragenter", "dragover"]) {
    document.addEventListener(name, (event) => {
      event.preventDefault();
      drop.classList.add("over");
    });
  }
  document.addEventListener("dragleave", (event) => {
    if (!event.relatedTarget) drop.classList.remove("over");
  });
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    drop.classList.remove("over");
    open(event.dataTransfer.files);
  });
  for (const name of ["center", "width"]) find(name).addEventListener("input", moveWindow);
  find("reset").addEventListener("click", () => {
    setSliders(viewer.window);
    viewer.paintWindow(null);
    if (find("windowed").checked) {
      find("windowed").checked = false;
      outdate();
    }
  });
  find("windowed").addEventListener("change", outdate);
  if (ofVolumes()) connectSlices();
  else connectFrames();
  find("opacity").addEventListener("input", () => {
    viewer.opacity = Number(find("opacity").value) / 100;
    find("opacity-value").textContent = `${find("opacity").value} %`;
    viewer.paint();
  });
  find("clear-map").addEventListener("click", () => { hideMap(); find("phrase").focus(); });
  find("report").addEventListener("click", writeReport);
  find("example").addEventListener("click", openExample);
  find("neighbors").addEventListener("click", findNeighbors);
  for (const [id, act] of [["findings-form", score], ["question-form", answerQuestion],
    ["map-form", () => find("phrase").value.trim() && showMap(find("phrase").value.trim(), null)]]) {
    find(id).addEventListener("submit", (event) => {
      event.preventDefault();
      act();
    });
  }
}

function connectFrames() {
  find("frame").addEventListener("input", () => { find("frame-value").textContent = `${find("frame").value} of ${find("frame").max}`; });
  find("frame").addEventListener("change", async () => { if (await load()) await score(); });
}

function connectSlices() {
  find("frame").addEventListener("input", () => {
    viewer.setSlice(Number(find("frame").value) - 1);
    showSlice();
  });
  let turned = 0; // of the wheel, so that a touchpad does not race through the slices
  find("panels").addEventListener("wheel", (event) => {
    event.preventDefault();
    turned += event.deltaMode ? 40 * event.deltaY : event.deltaY;
    const steps = Math.trunc(turned / 40);
    if (!steps) return;
    turned -= 40 * steps;
    viewer.setSlice(viewer.slice + Math.sign(steps) * Math.min(4, Math.abs(steps)));
    showSlice();
  }, { passive: false });
  find("presets").append(...PRESETS.map(([name, center, width]) => {
    const button = element("button", { type: "button", title: `level ${center}, width ${width}` }, name);
    button.addEventListener("click", () => {
      find("center").value = String(center);
      find("width").value = String(width);
      moveWindow();
    });
    return button;
  }));
}

// Words of the page for models of volumes.
function speakOfVolumes() {
  document.title = "medvl: one volume";
  find("image-heading").textContent = "Volume";
  document.querySelector("#drop .big").textContent = "Drop a CT here, or choose its files";
  find("formats").textContent = "NIfTI, a zip of a DICOM series, or all files of the series";
  find("kept").textContent = "The volume stays in memory until the answer is sent; nothing is stored.";
  find("file").multiple = true;
  find("file").removeAttribute("accept");
  document.querySelector("label[for=frame]").textContent = "Slice";
  document.querySelector("label[for=phrase]").textContent = "Map of a phrase through the slices";
  find("reset").textContent = "The model's window";
  find("windowed").parentElement.hidden = true;
  find("presets").hidden = false;
}

async function start() {
  try {
    served = await call("models");
  } catch (error) {
    complain(error.message);
    say("");
    return;
  }
  const able = (name) => served.models.some((model) => model.abilities[name]);
  document.body.classList.toggle("two", served.models.length > 1);
  find("models").replaceChildren(...served.models.map((model) => {
    const state = model.abilities.scores ? ` ${model.calibrated ? "calibrated" : "uncalibrated"}` : "";
    return element("li", { title: model.calibration || "" }, model.title, " ", element("small", {}, `${model.system}${state && ","}${state}`));
  }));
  find("example-row").hidden = !served.example;
  find("limit").textContent = `up to ${served.max_bytes / 1e6} MB`;
  find("findings-hint").textContent = `(empty: the ${served.findings.length} findings of ${served.prompts})`;
  find("findings").placeholder = `${served.findings.slice(0, 3).join("\n")}\nLarge left pleural effusion`;
  find("gallery").textContent = served.gallery ? `${served.gallery.toLocaleString("en")} images` : "";
  for (const [id, ability] of [["findings-section", "scores"], ["map-section", "heatmap"], ["question-section", "answer"], ["report-section", "report"]]) {
    find(id).hidden = !able(ability);
  }
  find("neighbors-section").hidden = !(served.gallery && able("neighbors"));
  find("map-row").hidden = !able("heatmap");
  if (ofVolumes()) speakOfVolumes();
  viewer = new (ofVolumes() ? VolumeViewer : Viewer)(find("panels"), served.models.map((model) => model.title));
  connect();
  say("Ready.");
  await open(find("file").files); // chosen before the models were known
}

start();
