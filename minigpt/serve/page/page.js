"use strict";

const at = (id) => document.getElementById(id);
const [LOWEST, HIGHEST] = [-8, 1]; // of the divergence's logarithm, as far as the chart shows it
const SVG = "http://www.w3.org/2000/svg";

const sides = [...document.querySelectorAll(".side")].map((section, number) => ({
  number,
  name: section.querySelector("h2 span"),
  chart: section.querySelector(".chart"),
  now: section.querySelector(".now"),
  text: section.querySelector(".text"),
  tokens: [], // {event, element, bar}
}));
let writing = null; // the AbortController of what is being written
let following = true; // whether the newest token is the current one

function request() {
  return {
    models: [at("left").value, at("right").value],
    prompt: at("prompt").value,
    max_tokens: Number(at("tokens").value),
    temperature: Number(at("temperature").value),
    seed: Number(at("seed").value),
  };
}

function headers() {
  const key = at("key").value;
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

/* A response, or an Error with the server's own sentence. */
async function ask(path, options = {}) {
  const response = await fetch(path, { ...options, headers: headers() });
  if (response.ok) return response;
  if (response.status === 401) at("key-field").hidden = false;
  const body = await response.json().catch(() => null);
  throw new Error(inWordsOfThePage(body?.error?.message ?? `the server answered with status ${response.status}`));
}

/* The server's sentence with the labels of this page for its fields. */
function inWordsOfThePage(message) {
  const labels = { max_tokens: "Tokens", temperature: "Temperature", seed: "Seed", prompt: "Prompt" };
  return message.replace(/^(max_tokens|temperature|seed|prompt)\b|\bmax_tokens\b/g, (field) => labels[field]);
}

function complain(message) {
  at("error").textContent = message;
  at("error").hidden = !message;
}

async function loadModels() {
  try {
    const { data } = await (await ask("v1/models")).json();
    for (const [place, id] of ["left", "right"].entries()) {
      at(id).replaceChildren(...data.map((model) => new Option(model.id, model.id)));
      at(id).selectedIndex = Math.min(place, data.length - 1);
    }
    const most = Math.min(...data.map((model) => model.max_model_len));
    if (Number(at("tokens").value) > most / 2) at("tokens").value = Math.floor(most / 2);
    complain("");
    if (data.length === 1) {
      at("status").textContent = "This server has one norm. Start it with --norm fused --norm rms to compare two.";
    }
  } catch (error) {
    complain(error.message);
  }
}

async function write() {
  stop();
  const controller = (writing = new AbortController());
  const body = request();
  reset(body);
  setBusy(true);
  complain("");
  try {
    const response = await ask("compare", { method: "POST", body: JSON.stringify(body), signal: controller.signal });
    for await (const event of events(response.body)) {
      if (event.error) throw new Error(inWordsOfThePage(event.error.message));
      add(event);
    }
    at("status").textContent = `Done. ${summary()}`;
  } catch (error) {
    if (error.name === "AbortError") at("status").textContent = `Stopped. ${summary()}`;
    else {
      at("status").textContent = summary();
      complain(error.message);
    }
  } finally {
    if (writing === controller) setBusy(false);
  }
}

function stop() {
  writing?.abort();
  writing = null;
}

function setBusy(busy) {
  if (!busy) writing = null;
  at("stop").disabled = !busy;
  at("sides").classList.toggle("writing", busy);
  at("sides").setAttribute("aria-busy", busy);
}

/* The JSON of server-sent events, one by one. */
async function* events(stream) {
  let text = "";
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (text + value).split("\n\n");
    text = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

function reset(body) {
  following = true;
  at("status").textContent = "Reading the prompt…";
  for (const side of sides) {
    const prompt = element("span", "prompt", body.prompt);
    side.name.textContent = body.models[side.number];
    side.text.replaceChildren(prompt);
    side.chart.replaceChildren();
    side.now.textContent = "";
    side.tokens = [];
  }
}

function element(kind, className, text) {
  const made = document.createElement(kind);
  made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function add(event) {
  const side = sides[event.side];
  const token = { event, element: element("span", "token"), bar: document.createElementNS(SVG, "rect") };
  const shown = event.text.replaceAll("\n", "⏎\n");
  token.element.append(element("span", "said", shown), alternatives(event));
  token.element.tabIndex = side.tokens.length ? -1 : 0;
  token.element.setAttribute("aria-label", label(event));
  token.bar.addEventListener("click", () => choose(side, token, true));
  side.tokens.push(token);
  side.text.append(token.element);
  side.chart.append(token.bar);
  draw(side);
  mark();
  if (following) choose(side, token, false);
  at("status").textContent = summary();
}

function label(event) {
  const all = event.alternatives.map((one) => `${one.token} ${percent(one.probabilities[0])}, ${percent(one.probabilities[1])}`);
  return `${event.chosen.token}; KL ${nats(event.kl)} nats; likeliest: ${all.join("; ")}`;
}

function alternatives(event) {
  const box = element("div", "alternatives");
  const head = element("div", "row head");
  head.append(element("span", "", "Alternative"), element("span", "", sides[0].name.textContent), element("span", "", sides[1].name.textContent));
  box.append(head);
  const isAmong = event.alternatives.some((one) => one.id === event.chosen.id);
  for (const one of isAmong ? event.alternatives : [...event.alternatives, event.chosen]) {
    const row = element("div", one.id === event.chosen.id ? "row chosen" : "row");
    row.append(element("code", "", visible(one.token)));
    one.probabilities.forEach((probability, number) => {
      const bar = element("div", `bar ${number ? "second" : "first"}`);
      bar.style.setProperty("--share", `${100 * probability}%`);
      bar.append(element("span", "", percent(probability)));
      row.append(bar);
    });
    box.append(row);
  }
  return box;
}

const visible = (token) => token.replaceAll(" ", "␣").replaceAll("\n", "⏎");

function percent(probability) {
  const hundred = 100 * probability;
  return hundred >= 99.95 ? "100%" : hundred >= 0.01 ? `${hundred.toFixed(hundred < 10 ? 2 : 1)}%` : "<0.01%";
}

function nats(kl) {
  return kl < 1e-6 ? "under 0.000001" : kl.toLocaleString("en", { maximumSignificantDigits: 3 });
}

function draw(side) {
  const width = Math.max(side.tokens.length, 24);
  side.chart.setAttribute("viewBox", `0 0 ${width} 1`);
  const { event, bar } = side.tokens.at(-1);
  const height = Math.max(0.02, Math.min(1, (Math.log10(Math.max(event.kl, 1e-12)) - LOWEST) / (HIGHEST - LOWEST)));
  const place = { x: event.position + 0.08, y: 1 - height, width: 0.84, height };
  for (const [name, value] of Object.entries(place)) bar.setAttribute(name, value);
}

/* Mark the first token in which the two texts differ. */
function mark() {
  const place = firstDifference();
  if (place === null) return;
  for (const side of sides) {
    side.tokens[place]?.element.classList.add("differs");
  }
}

function firstDifference() {
  const [left, right] = sides.map((side) => side.tokens);
  for (let place = 0; place < Math.min(left.length, right.length); place += 1) {
    if (left[place].event.chosen.id !== right[place].event.chosen.id) return place;
  }
  return null;
}

function summary() {
  const [left, right] = sides.map((side) => side.tokens.length);
  const all = sides.flatMap((side) => side.tokens.map((token) => token.event.kl));
  if (!all.length) return "";
  const mean = all.reduce((sum, kl) => sum + kl, 0) / all.length;
  const place = firstDifference();
  const parting = place === null ? "no difference" : `first difference at token ${place + 1}`;
  return `${left} and ${right} tokens, ${parting}, mean KL ${nats(mean)} nats, largest ${nats(Math.max(...all))}.`;
}

function show(side, token) {
  side.now.textContent = `token ${token.event.position + 1}: ${nats(token.event.kl)} nats`;
}

/* Show a token as the current one of its side. */
function choose(side, token, byHand) {
  if (byHand) following = false;
  for (const other of side.tokens) {
    const isIt = other === token;
    other.element.classList.toggle("current", isIt && byHand);
    other.bar.classList.toggle("current", isIt && byHand);
    other.element.tabIndex = isIt ? 0 : -1;
  }
  show(side, token);
  if (byHand && document.activeElement !== token.element) token.element.focus({ preventScroll: false });
}

for (const side of sides) {
  const tokenOf = (target) => side.tokens.find((token) => token.element.contains(target));
  side.text.addEventListener("focusin", ({ target }) => {
    const token = tokenOf(target);
    if (token) choose(side, token, true);
  });
  side.text.addEventListener("focusout", () => {
    for (const token of side.tokens) {
      token.element.classList.remove("current");
      token.bar.classList.remove("current");
    }
  });
  side.text.addEventListener("pointerover", ({ target }) => {
    const token = tokenOf(target);
    if (token) show(side, token);
  });
  side.text.addEventListener("keydown", (event) => {
    const here = side.tokens.indexOf(tokenOf(event.target));
    const next = { ArrowRight: here + 1, ArrowLeft: here - 1, Home: 0, End: side.tokens.length - 1 }[event.key];
    if (event.key === "Escape") event.target.blur();
    if (next === undefined || !side.tokens[next]) return;
    event.preventDefault();
    choose(side, side.tokens[next], true);
  });
}

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

function asCurl() {
  const key = at("key").value ? ' -H "Authorization: Bearer $MINIGPT_API_KEY"' : "";
  const body = JSON.stringify(request());
  return `curl -N ${location.origin}/compare -H 'Content-Type: application/json'${key} -d ${quoted(body)}`;
}

function asPython() {
  const { models, prompt, max_tokens, temperature, seed } = request();
  const key = at("key").value ? 'os.environ["MINIGPT_API_KEY"]' : '"none"';
  return [
    ...(at("key").value ? ["import os", ""] : []),
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url="${location.origin}/v1", api_key=${key})`,
    `for model in ${JSON.stringify(models)}:`,
    "    answer = client.completions.create(",
    `        model=model, prompt=${JSON.stringify(prompt)}, max_tokens=${max_tokens}, temperature=${temperature}, seed=${seed}`,
    "    )",
    "    print(model, answer.choices[0].text)",
    "",
  ].join("\n");
}

async function copy(text, what) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = element("textarea", "", text); // where the page is not served securely
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  at("status").textContent = `Copied as ${what}.`;
}

at("form").addEventListener("submit", (event) => {
  event.preventDefault();
  write();
});
at("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) at("form").requestSubmit();
});
at("stop").addEventListener("click", stop);
at("curl").addEventListener("click", () => copy(asCurl(), "curl"));
at("python").addEventListener("click", () => copy(asPython(), "Python"));
at("key").addEventListener("change", loadModels);
at("expand").addEventListener("change", () => at("sides").classList.toggle("expanded", at("expand").checked));
at("temperature").addEventListener("input", () => {
  at("temperature-shown").textContent = Number(at("temperature").value).toFixed(2);
});
at("temperature-shown").textContent = Number(at("temperature").value).toFixed(2);
loadModels();
