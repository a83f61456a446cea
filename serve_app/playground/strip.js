// The server at work: what its counters say of the last second, and its processes as lamps.

import { announce, count, duration, find, make, percent, size } from "./dom.js";
import { ask, json } from "./server.js";
import { kindOf } from "./evidence.js";

const PERIOD = 1000;
const PHASES = { body: "body", head: "head", decide: "decisions", exchange: "exchange", draft: "drafts" };
const NAMES = { body: "engine", shard: "shard", sampler: "sampler", drafter: "drafter", api: "API" };

let about = null;
let before = null;
let known = new Map(); // by process, of those that have been seen
let told = {};
let timer = 0;
const killed = new Map(); // by process: the names of those whose end the server has not noticed yet

/** Why a stream may have to wait; null where nothing is known to be wrong. */
export function trouble() {
  if (told.ready === false) return told.reason ?? "the engine is gone";
  const [name] = killed.values();
  return name ? `${name} is being replaced` : null;
}

/** Looks at the server once a second, while anybody looks at the page. */
export function startStrip(server) {
  about = server;
  document.addEventListener("visibilitychange", look);
  look();
}

/** Looks now, and from then on. */
export async function look() {
  clearTimeout(timer);
  if (document.hidden) return;
  try {
    told = await json("status");
    counters(told.counters);
    lamps(told.roles);
  } catch {
    told = { ready: false, reason: "the server does not answer" };
    lamps([]);
  }
  timer = setTimeout(look, PERIOD);
}

function counters(now) {
  const used = now.kv_blocks_total ? now.kv_blocks_used / now.kv_blocks_total : 0;
  const waits = `${count(now.running)} running, ${count(now.waiting)} waiting`;
  find("figure-cache").textContent = `${percent(used, 1)} of ${count(now.kv_blocks_total)} blocks`;
  find("figure-queue").textContent = waits;
  const then = before;
  before = now;
  if (!then || now.steps <= then.steps) return;
  const seconds = (counts) => ({
    body: counts.body_seconds, head: counts.head_seconds, decide: counts.decide_seconds,
    exchange: Object.values(counts.exchange_seconds).reduce((sum, each) => sum + each, 0),
    draft: counts.draft_seconds,
  });
  const [old, own] = [seconds(then), seconds(now)];
  const spent = Object.keys(PHASES).map((name) => [name, own[name] - old[name]]).filter(([, value]) => value > 0);
  const all = spent.reduce((sum, [, value]) => sum + value, 0);
  const bar = make("span", { className: "bar", "aria-hidden": "true" });
  for (const [name, value] of spent) {
    const part = make("span", { className: `phase ${name}` });
    part.style.flexGrow = String(value / all);
    bar.append(part);
  }
  const step = duration((1000 * all) / (now.steps - then.steps));
  const words = spent.filter(([, value]) => value / all >= 0.005)
    .map(([name, value]) => make("span", { className: `share ${name}` }, `${PHASES[name]} ${percent(value / all)}`));
  find("figure-time").replaceChildren(bar, make("span", { className: "shares" }, `${step}: `, ...words));
}

function lamps(roles) {
  const now = new Map();
  for (const role of roles) {
    if (role.role === "api") continue;
    const own = now.get(role.process_id) ?? { parts: [], host: role.host };
    own.parts.push(role.role === "body" ? NAMES.body : `${NAMES[role.role]} ${role.index}`);
    now.set(role.process_id, own);
  }
  // A process that is gone stays, dark, until others have taken its place.
  for (const id of killed.keys()) if (roles.length && !now.has(id)) killed.delete(id);
  const shown = [...now].map(([id, own]) => ({ id, lit: !killed.has(id), ...own }));
  const taken = new Set(shown.flatMap((each) => each.parts));
  for (const [id, own] of known) {
    if (!now.has(id) && !own.parts.some((part) => taken.has(part))) shown.push({ id, lit: false, ...own });
  }
  known = new Map(shown.map(({ id, parts, host }) => [id, { parts, host }]));
  shown.sort((a, b) => a.parts[0].localeCompare(b.parts[0]));
  const signature = JSON.stringify(shown);
  const list = find("lamps");
  if (list.dataset.shown === signature) return;
  list.dataset.shown = signature;
  list.replaceChildren(...shown.map(lamp));
}

function lamp({ id, parts, lit }) {
  const name = parts.includes(NAMES.body) ? NAMES.body : parts.join(", ");
  const state = lit ? "running" : "gone";
  const kill = make("button", { type: "button", className: "kill", "aria-label": `Kill the ${name}, process ${id}`,
    title: `Kill the ${name} (SIGKILL)`, on: { click: () => end(id, name) } }, "Kill");
  return make("li", { className: `lamp ${state}`, title: `${parts.join(", ")}: process ${id}` },
    make("span", { className: "bulb", "aria-hidden": "true" }), make("span", {}, name),
    make("span", { className: lit ? "unseen" : "state" }, state), lit && about.kills ? kill : null);
}

async function end(id, name) {
  try {
    await ask("playground/kill", { process_id: id });
    killed.set(id, name);
    announce(`The ${name} was killed`);
  } catch (error) {
    announce(error.message, true);
  }
  look();
}

/** What the replies of a turn say of themselves, summed up as they come. */
export class Figures {
  started = performance.now();
  sums = { tokens: 0, atFirst: 0, drawn: 0, certified: 0, read: 0 };

  add(tokens, now) {
    if (!tokens.length) return;
    const { sums } = this;
    this.first ??= now;
    this.last = now;
    sums.tokens += tokens.length;
    if (now === this.first) sums.atFirst += tokens.length;
    for (const token of tokens.filter(({ certificate }) => certificate)) {
      sums.drawn += 1;
      sums.certified += ["dense", "relaxed"].includes(kindOf(token)) ? 0 : 1;
      sums.read += token.certificate.bytes_read;
    }
  }

  show() {
    const { tokens, atFirst, drawn, certified, read } = this.sums;
    if (!tokens) return;
    find("figure-first").textContent = duration(this.first - this.started);
    // What the first read brought took the time before it; where that was all, both count.
    const rate = tokens > atFirst ? (tokens - atFirst) / (this.last - this.first) : tokens / (this.last - this.started);
    find("figure-rate").textContent = count(Math.round(1000 * rate));
    if (!drawn) return;
    find("figure-bytes").textContent = `${size(read / drawn)}, its share of a pass`;
    find("figure-certified").textContent = percent(Math.floor((1000 * certified) / drawn) / 1000, certified === drawn ? 0 : 1);
  }
}
