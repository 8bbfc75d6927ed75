"use strict";
// Everything that a model or a user wrote reaches the page by textContent alone.
const read = (id) => JSON.parse(document.getElementById(id).textContent);
const specs = read("specs"), blocks = read("blocks"), opened = new Map();
const rows = [...document.querySelectorAll("#groups tbody tr")];
let group = null, place = -1, number = 0;

function element(tag, kind, text, parent) {
  const made = document.createElement(tag);
  if (kind) made.className = kind;
  if (text !== undefined && text !== null) made.textContent = text;
  if (parent) parent.append(made);
  return made;
}

const shown = (value) => (value === null || value === undefined ? "none" : String(Number(value.toPrecision(4))));

// Charts are drawn when they come into sight: a run has dozens.
if (window.vegaEmbed) {
  const sight = new IntersectionObserver((seen) => {
    for (const { isIntersecting, target } of seen) {
      if (!isIntersecting) continue;
      sight.unobserve(target);
      vegaEmbed(target, (specs.curves[target.dataset.spec] || specs.distributions[target.dataset.spec]), { actions: false, renderer: "svg" });
    }
  }, { rootMargin: "400px" });
  document.querySelectorAll(".chart").forEach((figure) => sight.observe(figure));
}

async function enhanceTables() {
  const source = document.getElementById("datatables");
  if (!source) return;
  const url = URL.createObjectURL(new Blob([source.textContent], { type: "text/javascript" }));
  const { ITable } = await import(url);
  URL.revokeObjectURL(url);
  for (const table of document.querySelectorAll("table.data")) new ITable(table, { order: [], pageLength: 10, autoWidth: false });
}

async function unpack(at) {
  if (!opened.has(at)) {
    const bytes = Uint8Array.from(atob(blocks[at]), (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    opened.set(at, JSON.parse(await new Response(stream).text()));
  }
  return opened.get(at);
}

async function open(at, sample = 0) {
  if (at < 0 || at >= blocks.length) return;
  place = at;
  const found = await unpack(at);
  if (place !== at) return;
  group = found;
  rows.forEach((row, other) => row.classList.toggle("shown", other === at));
  document.getElementById("where").textContent =
    `step ${group.step}, group ${group.id} (${at + 1} of ${blocks.length}) ${group.labels.join(", ")}`;
  const head = document.getElementById("head");
  head.replaceChildren();
  element("pre", "", group.prompt, head);
  if (group.label) element("p", "note", `label: ${group.label}`, head);
  if (group.rejection) element("p", "note", `not trained on: ${group.rejection}`, head);
  for (const failure of group.failures) element("p", "note", `failed trajectory: ${failure}`, head);
  folded("metadata of the prompt", group.metadata, head);
  const cards = document.getElementById("cards");
  cards.replaceChildren();
  group.samples.forEach((one, index) => {
    const card = element("button", one.parent === null ? "card" : "card child", null, cards);
    element("b", "", title(one), card);
    element("span", "", one.text.slice(0, 500), card);
    card.onclick = () => choose(index);
  });
  choose(Math.min(sample, group.samples.length - 1));
}

function title(one) {
  const words = [`reward ${one.reward === null ? one.outcome || "none" : shown(one.reward)}`, `${one.length} tokens`, one.stop];
  if (one.trajectory !== null) words.push(`trajectory ${one.trajectory}`);
  if (one.role) words.push(one.role);
  if (one.parent !== null) words.push(`branches from sample ${one.parent} after ${one.shared} tokens`);
  return words.join(" | ");
}

function folded(name, text, parent) {
  if (!text) return;
  const details = element("details", "", null, parent);
  element("summary", "", name, details);
  element("pre", "", text, details);
}

function choose(index) {
  const turns = document.getElementById("turns");
  turns.replaceChildren();
  [...document.getElementById("cards").children].forEach((card, other) => card.classList.toggle("shown", other === index));
  number = index;
  const one = group.samples[index];
  document.getElementById("which").textContent = one ? `Sample ${one.index}: ${title(one)}` : "No sample";
  if (one) {
    // The row of cards alone: the page opens at its top.
    const cards = document.getElementById("cards");
    cards.scrollLeft = cards.children[index].offsetLeft - cards.offsetLeft;
    folded("prompt of this sample", one.prompt, turns);
    folded("parts of the reward", one.parts, turns);
    folded("message of the reward", one.message, turns);
    folded("metadata of the sample", one.metadata, turns);
    if (one.tokens) drawTurns(one, turns);
    else {
      element("p", "note", "Of this sample the text alone was kept: its tokens left the buffer with a checkpoint (run.keep_groups).", turns);
      element("div", "turn", one.text, turns);
    }
  }
  quantityChanged();
}

const at = (values, index) => (Array.isArray(values) ? values[index] : values);

// The number with full colour: nearly all of the sample's numbers are smaller; noise has no colour.
function limit(name, values) {
  const sizes = (Array.isArray(values) ? values : [values]).filter((value) => value !== null).map(Math.abs).sort((a, b) => a - b);
  return Math.max(sizes[Math.floor(sizes.length * 0.98)] || 0, Number(document.getElementById(`q-${name}`).dataset.floor));
}

function drawTurns(one, parent) {
  const names = Object.keys(one.numbers), limits = Object.fromEntries(names.map((name) => [name, limit(name, one.numbers[name])]));
  const [gapAt, gap] = one.gap;
  one.turns.forEach(([begin, ours], turn) => {
    const end = turn + 1 < one.turns.length ? one.turns[turn + 1][0] : one.tokens.length;
    const box = element("div", ours ? "turn" : "turn other", null, parent);
    element("b", "", ours ? "policy" : "environment or template", box);
    for (let index = begin; index < end; index++) {
      if (gap && index === gapAt) element("i", "", ` [${gap} tokens left out] `, box);
      const token = element("span", "t", one.tokens[index].replace(/\n/g, "\u21b5\n"), box);
      if (!at(one.mask, index)) token.classList.add("masked");
      if (at(one.clipped, index)) token.classList.add("clipped");
      const words = [`token ${index + (gap && index >= gapAt ? gap : 0)}, id ${one.ids[index]}`];
      for (const name of names) {
        const value = at(one.numbers[name], index);
        if (value === null) continue;
        token.style.setProperty(`--${name}`, Math.max(-1, Math.min(1, value / limits[name])).toFixed(3));
        words.push(`${name} ${shown(name === "ratio" ? Math.exp(value) : value)}`);
      }
      if (!at(one.mask, index)) words.push("not trained on");
      if (at(one.clipped, index)) words.push("clipped");
      token.title = words.join("\n");
    }
  });
}

function quantityChanged() {
  const one = group && group.samples[number], chosen = document.querySelector("input[name=quantity]:checked");
  const legend = document.getElementById("legend"), figure = document.getElementById("positions");
  figure.replaceChildren();
  if (!one || !chosen) return;
  for (const input of document.querySelectorAll("input[name=quantity]"))
    input.parentElement.style.opacity = one.numbers && input.value in one.numbers ? 1 : 0.4;
  const values = one.numbers && one.numbers[chosen.value], name = chosen.parentElement.textContent.trim();
  if (values === undefined) {
    legend.textContent = one.tokens ? `${name} was not recorded for this sample.` : "";
    return;
  }
  const most = limit(chosen.value, values);
  legend.textContent = `${name}: ${chosen.parentElement.title}. Full orange at ${shown(most)}, full blue at ${shown(-most)}; ` +
    "dim tokens were not trained on.";
  if (!window.vegaEmbed) return;
  const data = one.tokens.map((text, index) => ({ place: index + (index >= one.gap[0] ? one.gap[1] : 0), value: at(values, index), text }));
  const spec = { ...specs.others.positions, datasets: { positions: data.filter(({ value }) => value !== null) } };
  vegaEmbed(figure, spec, { actions: false, renderer: "canvas" });
}

if (blocks.length) {
  rows.forEach((row, index) => row.addEventListener("click", () => {
    open(index);
    document.getElementById("viewer").scrollIntoView();
  }));
  document.getElementById("back").onclick = () => open(place - 1);
  document.getElementById("on").onclick = () => open(place + 1);
  document.getElementById("choice").addEventListener("change", quantityChanged);
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || /^(text|search|number)$/.test(event.target.type || "") || !group) return;
    const inputs = document.querySelectorAll("input[name=quantity]"), digit = Number(event.key);
    if (event.key === "n") open(place + 1);
    else if (event.key === "p") open(place - 1);
    else if (event.key === "j" && number + 1 < group.samples.length) choose(number + 1);
    else if (event.key === "k" && number > 0) choose(number - 1);
    else if (digit >= 1 && digit <= inputs.length) {
      inputs[digit - 1].checked = true;
      quantityChanged();
    }
  });
  open(0);
}
enhanceTables();
