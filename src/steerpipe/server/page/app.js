// Joins the parts of the page: the live frames, the conversation, the message that is typed.

import { events, getJson, onKeyWanted, postJson } from "/page/api.js";
import { Conversation, figuresOf } from "/page/chat.js";
import { Draft } from "/page/draft.js";
import { Panel } from "/page/panel.js";

const LONGEST_PAUSE_MS = 4000;
const byId = (id) => document.getElementById(id);
const panel = new Panel();
const conversation = new Conversation();
const draft = new Draft(byId("warm"), byId("warmth"));
const [prompt, send, switcher] = [byId("prompt"), byId("send"), byId("prediction")];
let running = null; // the AbortController of the answer that comes
let looking = null; // the AbortController of the live frames
let leaving = false; // the page goes: what breaks now is no fault

// --- what the server does

async function look() {
  let pause = 250;
  while (!document.hidden) {
    looking = new AbortController();
    try {
      for await (const frame of events("/live", { signal: looking.signal })) {
        pause = 250;
        showFrame(frame);
      }
    } catch (problem) {
      if (looking.signal.aborted) return;
      showState("lost", problem instanceof TypeError ? "no connection, trying again" : problem.message);
    }
    await new Promise((done) => setTimeout(done, pause));
    pause = Math.min(2 * pause, LONGEST_PAUSE_MS);
  }
}

function showFrame(frame) {
  const loading = frame.loaded ? `loading, ${Math.round(100 * frame.loaded)} %` : "loading";
  showState(frame.state, { ready: "ready", loading, failed: "the model cannot be loaded" }[frame.state] || frame.state);
  if (frame.state !== "ready") return;
  if (!byId("model").textContent) nameModel();
  panel.show(frame);
  const { prediction } = frame;
  switcher.disabled = !prediction;
  if (prediction) switcher.setAttribute("aria-checked", String(prediction.on));
  draft.enabled = !prediction || prediction.on;
  byId("verdict").textContent = !prediction ? "Nothing is predicted here."
    : !prediction.on ? "Prediction is off: experts come when they are missing, and typing warms nothing."
    : prediction.line ? `Last trial: ${prediction.line}.`
    : "Prediction is on: the first tokens show whether it pays.";
}

function showState(state, text) {
  const shown = byId("state");
  if (shown.textContent !== text) shown.textContent = text;
  shown.dataset.state = state;
}

async function nameModel() {
  try {
    const { model, drafts } = await getJson("/props");
    byId("model").textContent = model;
    draft.refused = !drafts;
  } catch { /* the next frame tries again */ }
}

document.addEventListener("visibilitychange", () => {
  looking?.abort();
  if (!document.hidden) look();
});

addEventListener("pagehide", () => { leaving = true; });
addEventListener("pageshow", () => { leaving = false; });

switcher.addEventListener("click", async () => {
  const on = switcher.getAttribute("aria-checked") !== "true";
  try {
    const told = await postJson("/prediction", { on });
    switcher.setAttribute("aria-checked", String(told.on));
  } catch (problem) {
    byId("verdict").textContent = problem.message;
  }
});

// --- the message and its answer

async function ask() {
  const text = prompt.value.trim();
  if (!text || running) return;
  const before = conversation.messages;
  conversation.add({ role: "user", content: text });
  const turn = conversation.add({ role: "assistant", content: "", open: true });
  prompt.value = "";
  grow();
  running = new AbortController();
  showRunning(true);
  const began = performance.now();
  let firstMs = 0;
  try {
    const answer = draft.submit(text, before, running.signal);
    for await (const chunk of answer) {
      const delta = chunk.choices?.[0]?.delta || {};
      const [content, thinking] = [delta.content || "", delta.reasoning_content || ""];
      if (chunk.error) throw new Error(chunk.error.message);
      if ((content || thinking) && !firstMs) firstMs = performance.now() - began;
      if (content || thinking) conversation.extend(turn, content, thinking);
      if (chunk.timings) turn.figures = figuresOf(chunk, firstMs, draft.savedMs);
    }
  } catch (problem) {
    turn.note = running.signal.aborted ? "Stopped." : problem instanceof TypeError
      ? "The connection was lost before the answer was complete." : problem.message;
  }
  if (leaving) return;
  if (!turn.figures && !turn.note) turn.note = "The connection was lost before the answer was complete.";
  turn.open = false;
  running = null;
  conversation.finish(turn);
  showRunning(false);
  announce(turn.note ? `${turn.content} ${turn.note}` : turn.content);
  prompt.focus();
}

function showRunning(runs) {
  send.textContent = runs ? "Stop" : "Send";
  if (runs) announce("Answering.");
}

function announce(text) { byId("announce").textContent = text; }

function grow() {
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight + 2}px`;
}

prompt.addEventListener("input", () => {
  grow();
  draft.type(prompt.value, conversation.messages);
});
prompt.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    ask();
  }
});
document.addEventListener("keydown", (event) => { if (event.key === "Escape") running?.abort(); });
byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running) running.abort();
  else ask();
});
byId("clear").addEventListener("click", () => {
  running?.abort();
  conversation.clear();
  prompt.focus();
});

onKeyWanted(() => new Promise((given) => {
  const dialog = byId("keys");
  if (dialog.open) return given("");
  dialog.showModal();
  dialog.addEventListener("close", () => given(byId("key").value), { once: true });
}));

if (matchMedia("(max-width: 52rem)").matches) document.querySelector(".panel").open = false;
look();
