// The conversation: kept in this tab only, shown as it comes, and there again after a reload.

import { percent } from "/page/panel.js";

const STORE = "steerpipe.chat";
const byId = (id) => document.getElementById(id);

export class Conversation {
  constructor() {
    this.list = byId("messages");
    this.scroll = byId("scroll");
    this.turns = [];
    for (const turn of JSON.parse(sessionStorage.getItem(STORE) || "[]")) {
      if (turn.open) Object.assign(turn, { open: false, note: "The page was reloaded before the answer was complete." });
      this.add(turn);
    }
    this.save();
  }

  /** What the model is asked with: complete turns, oldest first. */
  get messages() {
    return this.turns.filter((turn) => turn.content).map(({ role, content }) => ({ role, content }));
  }

  add(turn) {
    const item = document.createElement("li");
    item.className = turn.role;
    item.append(make("h2", "who", turn.role === "user" ? "You" : "Answer"));
    turn.item = item;
    turn.thinking = turn.thinking || "";
    turn.text = make("div", "text", turn.content);
    item.append(turn.text);
    this.turns.push(turn);
    this.list.append(item);
    this.finish(turn);
    return turn;
  }

  /** More of an answer. */
  extend(turn, content, thinking) {
    const low = this.scroll.scrollHeight - this.scroll.scrollTop - this.scroll.clientHeight < 40;
    turn.content += content;
    turn.thinking += thinking;
    turn.text.textContent = turn.content;
    if (thinking) this.showThinking(turn);
    if (low) this.scroll.scrollTop = this.scroll.scrollHeight;
    this.save();
  }

  /** An answer has changed its state: it is open, complete, stopped or failed. */
  finish(turn) {
    turn.item.setAttribute("aria-busy", String(Boolean(turn.open)));
    for (const old of turn.item.querySelectorAll(".figures, .note")) old.remove();
    if (turn.thinking) this.showThinking(turn);
    if (turn.figures) turn.item.append(figureList(turn.figures));
    if (turn.note) turn.item.append(make("p", "note", turn.note));
    this.scroll.scrollTop = this.scroll.scrollHeight;
    this.save();
  }

  clear() {
    this.turns = [];
    this.list.replaceChildren();
    this.save();
  }

  showThinking(turn) {
    let details = turn.item.querySelector("details");
    if (!details) {
      details = document.createElement("details");
      details.append(make("summary", "", "Thinking"), make("div", "thinking", ""));
      turn.text.before(details);
    }
    details.lastChild.textContent = turn.thinking;
  }

  save() {
    const kept = this.turns.map(({ role, content, thinking, figures, note, open }) =>
      ({ role, content, thinking, figures, note, open }));
    sessionStorage.setItem(STORE, JSON.stringify(kept));
  }
}

/** The figures of one answer, from its last chunk and from what the page saw itself. */
export function figuresOf({ timings, experts }, firstMs, warmSavedMs) {
  const figures = [["first token", `${Math.round(firstMs)} ms`]];
  if (timings.predicted_per_second) figures.push(["speed", `${timings.predicted_per_second.toFixed(1)} tokens/s`]);
  if (timings.cache_n) figures.push(["prompt ready", `${timings.cache_n} of ${timings.cache_n + timings.prompt_n} tokens`]);
  if (experts && experts.leased) figures.push(["hit rate", percent(experts.hits / experts.leased)]);
  if (warmSavedMs >= 1) figures.push(["before Enter", `${Math.round(warmSavedMs)} ms`]);
  if (experts?.saved_ms != null) figures.push(["guesses saved, about", `${Math.round(experts.saved_ms)} ms`]);
  return figures;
}

function figureList(figures) {
  const list = make("dl", "figures", "");
  for (const [name, value] of figures) {
    const row = document.createElement("div");
    row.append(make("dt", "", name), make("dd", "", value));
    list.append(row);
  }
  return list;
}

function make(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.textContent = text;
  return element;
}
