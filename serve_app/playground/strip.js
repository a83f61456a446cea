// The server at work: what its counters say of the last second, and its processes as lamps.

import { announce, count, duration, find, make, percent, size } from "./dom.js";
import { ask, json } from "./server.js";
import { totals } from "./evidence.js";

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
    announce(error.message);
  }
  look();
}

/** What the replies of a turn say of themselves, as they come. */
export function replyFigures(replies, started, now) {
  const tokens = replies.flatMap((reply) => reply.tokens.slice(reply.offset));
  const first = Math.min(...replies.map((reply) => reply.first ?? Infinity));
  if (!Number.isFinite(first)) return;
  find("figure-first").textContent = duration(first - started);
  const since = now > first ? first : started; // all at once, where the page had no time to read
  find("figure-rate").textContent = count(Math.round((1000 * tokens.length) / (now - since)));
  const { drawn, certified, read } = totals(tokens);
  if (!drawn) return;
  const each = read / drawn;
  find("figure-bytes").textContent = `${size(each)} of ${size(about.head_bytes)}, ${percent(each / about.head_bytes)}`;
  find("figure-certified").textContent = percent(certified / drawn, certified === drawn ? 0 : 1);
}
