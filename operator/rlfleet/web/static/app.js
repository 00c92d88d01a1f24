"use strict";
// Draws what /api/fleet answers, every two seconds, and never writes HTML: text goes in as text.
// The token lives in this variable only.
let token = "";
let namespace = "";
let timer = 0;
let failures = 0;
let serial = 0;
let seen = 0;
const open = new Set();

const EVERY_MS = 2000;
const PARTS = ["plan", "stage", "quiesce", "transfer", "verify", "publish", "reopen"];
const LOOK = {
  Active: "good", True: "good", Succeeded: "good", Ok: "good",
  Loading: "wait", Booting: "wait", Pending: "wait", Draining: "wait", Unknown: "wait", Holding: "wait",
  Offloaded: "rest", Superseded: "rest",
  Quarantined: "bad", Failed: "bad", False: "bad", Expired: "bad", Cancelled: "wait",
};
const $ = (id) => document.getElementById(id);

function el(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "class") made.className = value;
    else if (name === "grow") made.style.flexGrow = String(value);
    else made.setAttribute(name, value);
  }
  for (const child of children.flat()) {
    if (child !== null && child !== undefined && child !== "") made.append(child);
  }
  return made;
}

const version = (v) => (v === null || v === undefined ? "–" : v < 0 ? "base" : `v${v}`);
const look = (word) => LOOK[word] || "soft";
function span(ms) {
  if (ms === null || ms === undefined) return "–";
  if (ms < 1000) return `${ms} ms`;
  return ms < 60000 ? `${(ms / 1000).toFixed(1)} s` : `${Math.floor(ms / 60000)} min ${Math.floor(ms / 1000) % 60} s`;
}
function ago(ms) {
  if (!ms) return "–";
  const s = Math.max(0, Math.floor((Date.now() - ms) / 1000));
  return s < 120 ? `${s} s` : s < 7200 ? `${Math.floor(s / 60)} min` : s < 172800 ? `${Math.floor(s / 3600)} h` : `${Math.floor(s / 86400)} d`;
}

async function ask(path, query) {
  const answer = await fetch(`${path}?${new URLSearchParams(query)}`, {
    headers: { Authorization: `Bearer ${token}` }, cache: "no-store", credentials: "omit",
  });
  let body = {};
  try { body = await answer.json(); } catch { body = { error: `HTTP ${answer.status}` }; }
  if (!answer.ok) throw Object.assign(new Error(body.error || `HTTP ${answer.status}`), { status: answer.status });
  return body;
}

async function refresh() {
  const mine = ++serial;
  clearTimeout(timer);
  let again = true;
  try {
    const found = await ask("api/fleet", namespace ? { namespace } : {});
    if (mine !== serial) return;
    failures = 0;
    seen = Date.now();
    $("hello").hidden = true;
    $("error").hidden = true;
    $("live").dataset.state = "on";
    $("live").textContent = `live, ${new Date().toLocaleTimeString()}`;
    $("foot").textContent = `rlfleet ${found.version}, read-only`;
    draw(found);
  } catch (e) {
    if (mine !== serial) return;
    failures += 1;
    $("live").dataset.state = "late";
    $("live").textContent = seen ? `stale since ${new Date(seen).toLocaleTimeString()}` : "not connected";
    $("error").hidden = false;
    $("error").textContent = e.message;
    // A token that is refused stays refused; what is shown was read with rights that are gone.
    if (e.status === 401 || e.status === 403 || e.status === 400) {
      again = false;
      $("fleet").replaceChildren();
    }
  }
  if (again) timer = setTimeout(refresh, Math.min(30000, EVERY_MS * 2 ** Math.min(failures, 4)));
}

function draw(found) {
  const rounds = Map.groupBy
    ? Map.groupBy(found.rounds, (r) => `${r.namespace}/${r.pipeline}`)
    : found.rounds.reduce((m, r) => m.set(`${r.namespace}/${r.pipeline}`, [...(m.get(`${r.namespace}/${r.pipeline}`) || []), r]), new Map());
  const cards = found.pipelines.map((p) => pipeline(p, rounds.get(`${p.namespace}/${p.name}`) || []));
  if (!cards.length) {
    cards.push(el("section", { class: "card", id: "nothing" },
      el("h2", {}, "No pipeline here"),
      el("p", {}, namespace ? `Namespace ${namespace} has no RLPipeline that this token may see.` : "No namespace has an RLPipeline."),
      el("p", { class: "soft" }, "docs/quickstart.md makes a first one.")));
  }
  // What somebody types into, or has scrolled to, stays where it is.
  const busy = document.activeElement;
  const key = busy && busy.dataset ? busy.dataset.key : undefined;
  const mark = key && busy.selectionStart !== undefined ? [busy.selectionStart, busy.selectionEnd] : null;
  const scrolled = [...document.querySelectorAll("#fleet .scroll")].map((e) => e.scrollLeft);
  $("fleet").replaceChildren(...cards);
  document.querySelectorAll("#fleet .scroll").forEach((e, i) => { e.scrollLeft = scrolled[i] || 0; });
  const again = key && document.querySelector(`[data-key="${CSS.escape(key)}"]`);
  if (again) {
    again.focus({ preventScroll: true });
    if (mark) again.setSelectionRange(...mark);
  }
}

function pipeline(p, rounds) {
  const ready = { True: ["good", "Ready"], False: ["bad", "Not ready"] }[p.ready] || ["wait", "Unknown"];
  const lag = p.lag ? `${p.lag} behind ${p.source} ${version(p.newest)}` : p.newest === null ? `${p.source}: nothing yet` : "up to date";
  const asleep = p.enginesAsleep ? ` (+${p.enginesAsleep} asleep)` : "";
  const facts = [
    ["committed", version(p.committed), ""], ["version lag", lag, p.lag ? "wait" : ""],
    ["engines", `${p.enginesActive} of ${p.enginesTotal}${asleep}`, ""], ["transport", p.mode, ""],
    ["now", p.operation || "nothing runs", p.operation ? "wait" : ""], ["fence", p.fence ? String(p.fence) : "–", ""],
  ];
  if (p.progress !== null) facts.push(["rollouts", `${p.progress} %`, ""]);
  return el("section", { class: "card", "data-pipeline": `${p.namespace}/${p.name}` },
    el("div", { class: "top" }, el("h2", {}, `${p.namespace}/${p.name}`),
      el("span", { class: `badge ${ready[0]}` }, ready[1]),
      p.ready === "True" ? null : el("span", { class: "soft" }, p.reason)),
    el("dl", { class: "facts" }, facts.map(([k, v, c]) => el("div", {}, el("dt", {}, k), el("dd", { class: c }, v)))),
    problems(p.problems), p.pools.map((pool) => poolPart(p, pool)), roundsPart(rounds), whatIf(p));
}

function problems(rows) {
  if (!rows.length) return null;
  return el("ul", { class: "problems" }, rows.map((r) =>
    el("li", { class: r.status === "Unknown" ? "wait" : "bad" }, el("strong", {}, r.reason),
      el("span", {}, r.message ? `: ${r.message}` : ""))));
}

function indices(ranges) {
  return String(ranges).split(",").flatMap((part) => {
    const [a, b] = part.split("-").map(Number);
    return Array.from({ length: (b ?? a) - a + 1 }, (_, i) => a + i);
  });
}

function cells(p, pool) {
  const listed = new Map(pool.engines.map((e) => [e.index, e]));
  const rows = pool.engines.map((e) => ({ index: e.index, name: e.name, state: e.state, version: e.version, why: e.failure }));
  if (pool.unlisted) {
    for (const v of pool.versions) {
      for (const i of indices(v.engines)) {
        if (!listed.has(i)) rows.push({ index: i, name: `${pool.name}-${i}`, state: "Active", version: v.version, why: null });
      }
    }
  }
  rows.sort((a, b) => a.index - b.index);
  return el("ul", { class: "cells", "aria-label": `engines of ${pool.name}` }, rows.map((e) => {
    const old = e.version !== p.committed;
    const text = `${e.name}: ${e.state}, ${version(e.version)}${e.why ? `, ${e.why}` : ""}`;
    const kind = e.why && e.state === "Active" ? "wait" : look(e.state);
    return el("li", { class: `${kind}${old ? " old" : ""}`, title: text, "aria-label": text }, e.state === "Active" && !e.why ? String(e.index % 100) : e.why && e.state === "Active" ? "?" : e.state[0]);
  }));
}

function more(key, title, content, opened) {
  const made = el("details", {}, el("summary", { "data-key": `${key}#open` }, title), content);
  made.open = open.has(key) || (opened && !open.has(`!${key}`));
  made.addEventListener("toggle", () => {
    open.delete(made.open ? `!${key}` : key);
    open.add(made.open ? key : `!${key}`);
  });
  return made;
}

function poolPart(p, pool) {
  const wanted = pool.active === null ? pool.replicas : Math.min(pool.replicas, pool.active);
  const others = Object.entries(pool.counts).filter(([k, n]) => n && k !== "active").map(([k, n]) => `${n} ${k}`);
  const head = [["engine", ""], ["state", ""], ["version", ""], ["fence", "more"], ["routed", "more"], ["transport", "more"],
    ["GPUs", "more"], ["node", "more"], ["why", ""]];
  const table = el("div", { class: "scroll" }, el("table", { class: "engines" },
    el("thead", {}, el("tr", {}, head.map(([h, c]) => el("th", { scope: "col", class: c }, h)))),
    el("tbody", {}, pool.engines.map((e) => el("tr", {}, el("td", {}, e.name), el("td", { class: look(e.state) }, e.state),
      el("td", {}, version(e.version)), el("td", { class: "more" }, e.fenced === null ? "–" : e.fenced ? "current" : "behind"),
      el("td", { class: "more" }, e.routed === null ? "–" : e.routed ? "yes" : "no"),
      el("td", { class: "more" }, e.transport || "–"),
      el("td", { class: "more" }, e.gpus === null ? "–" : String(e.gpus.length)),
      el("td", { class: "more" }, e.node || "–"),
      el("td", { class: "long" }, e.failure || ""))))));
  const key = `${p.namespace}/${p.name}/${pool.name}`;
  const rest = pool.unlisted ? `, ${pool.unlisted} active ones are not listed` : "";
  return el("div", { "data-pool": pool.name },
    el("h3", {}, `Pool ${pool.name}: ${pool.counts.active || 0} of ${wanted} active`,
      others.length ? el("span", { class: "soft" }, ` (${others.join(", ")})`) : null),
    cells(p, pool), problems(pool.problems),
    pool.engines.length ? more(key, `${pool.engines.length} engines${rest}`, table, pool.engines.length <= 8) : null);
}

function bar(r) {
  const known = PARTS.filter((k) => r.parts[k] !== undefined);
  const text = known.map((k) => `${k} ${span(r.parts[k])}`);
  const done = known.reduce((sum, k) => sum + r.parts[k], 0);
  const made = el("div", { class: "time", role: "img" }, known.map((k) => el("span", { class: k, grow: Math.max(r.parts[k], 1), title: `${k} ${span(r.parts[k])}` })));
  if (!r.outcome && r.startedMs) {
    const left = Math.max(1, Date.now() - r.startedMs - done);
    made.append(el("span", { class: "now", grow: left, title: `${r.phase} for ${span(left)}` }));
    text.push(`${r.phase} for ${span(left)}`);
  }
  made.setAttribute("aria-label", text.join(", ") || "no timings");
  return made;
}

function roundsPart(rounds) {
  if (!rounds.length) return el("p", { class: "soft" }, "No rounds yet.");
  const shown = rounds.slice(0, 12);
  const head = [["round", ""], ["outcome", ""], ["engines", "num eng"], ["total", "num"], ["paused", "num"], ["time", "bar"], ["age", "num age"]];
  return el("div", {}, el("h3", {}, "Rounds"), el("div", { class: "scroll" }, el("table", { class: "rounds" },
    el("thead", {}, el("tr", {}, head.map(([h, c]) => el("th", { scope: "col", class: c }, h)))),
    el("tbody", {}, shown.flatMap((r) => {
      const word = r.outcome || r.phase;
      const total = r.totalMs ?? (r.startedMs && !r.outcome ? Date.now() - r.startedMs : null);
      const share = r.totalMs && r.pausedMs !== null ? `${Math.round((100 * r.pausedMs) / r.totalMs)} %` : "–";
      const row = el("tr", { "data-round": r.name },
        el("td", { title: r.name }, `${r.kind === "CatchUp" ? "catch-up " : ""}${version(r.version)}${r.attempt > 1 ? ` #${r.attempt}` : ""}`),
        el("td", { class: look(word) }, word), el("td", { class: "num eng" }, r.members ? String(r.members) : "–"),
        el("td", { class: "num" }, span(total)), el("td", { class: "num" }, share), el("td", { class: "bar" }, bar(r)),
        el("td", { class: "num age" }, ago(r.finishedMs || r.createdMs)));
      const why = r.failure ? `${r.failure.stage}: ${r.failure.reason}: ${r.failure.message}` : r.waits;
      return why ? [row, el("tr", {}, el("td", { colspan: "7", class: `long ${r.failure ? "bad" : "wait"}` }, why))] : [row];
    })))),
    el("p", { class: "legend" }, PARTS.map((k) => el("span", {}, el("i", { class: k }), k))));
}

const guesses = new Map();
function whatIf(p) {
  const key = `${p.namespace}/${p.name}`;
  const kept = guesses.get(key) || { version: p.newest === null ? "" : String(p.newest), answer: null };
  guesses.set(key, kept);
  const input = el("input", { inputmode: "numeric", pattern: "-1|[0-9]+", value: kept.version, "aria-label": "version", required: "", "data-key": `${key}#version` });
  input.addEventListener("input", () => { kept.version = input.value; });
  const out = el("div", { "aria-live": "polite" }, kept.answer);
  const form = el("form", {}, el("label", {}, "A sync to version ", input), el("button", { type: "submit", "data-key": `${key}#ask` }, "would do what?"));
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    out.replaceChildren("asking every gate…");
    try {
      kept.answer = explained((await ask("api/look", { namespace: p.namespace, pipeline: p.name, version: kept.version })).explanation);
    } catch (e) {
      kept.answer = el("p", { class: "bad" }, e.message);
    }
    const now = document.querySelector(`[data-guess="${CSS.escape(key)}"]`);
    if (now) now.replaceChildren(kept.answer);
  });
  out.dataset.guess = key;
  return more(`${key}?`, "Dry run", el("div", {}, form, out), false);
}

function explained(x) {
  const kind = x.would === "WouldRun" ? "good" : x.would === "WouldWait" ? "wait" : "bad";
  return el("div", {}, el("p", {}, el("strong", { class: kind }, x.would), ` ${x.reason}: ${x.message}`),
    x.steps.length ? el("ol", {}, x.steps.map((s) => el("li", {}, s))) : null,
    el("div", { class: "scroll" }, el("table", {}, el("tbody", {}, x.engines.map((e) => el("tr", {}, el("td", {}, e.engine),
      el("td", { class: e.joins ? "good" : "wait" }, e.joins ? e.transport : "stays out"), el("td", { class: "long" }, e.why)))))));
}

$("who").addEventListener("submit", (event) => {
  event.preventDefault();
  if ($("token").value) token = $("token").value.trim();
  $("token").value = "";
  if (token) $("token").placeholder = "given; another one replaces it";
  namespace = $("namespace").value.trim();
  failures = 0;
  seen = 0;
  refresh();
});
document.addEventListener("visibilitychange", () => {
  if (!token) return;
  if (document.hidden) clearTimeout(timer);
  else refresh();
});
