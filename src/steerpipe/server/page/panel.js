// The panel: what lies where, what moves, and what prediction makes of it.

import { ExpertMap } from "/page/map.js";
import { Streams } from "/page/streams.js";

const SPOKEN_MS = 1000; // between two descriptions of the pictures for those who cannot see them
const STALE_MS = 500; // without a frame: nothing happens
const byId = (id) => document.getElementById(id);

export class Panel {
  constructor() {
    this.map = new ExpertMap(byId("map"));
    this.streams = new Streams(byId("streams"));
    this.untold = null; // the last frame, while the words for one before it are younger than SPOKEN_MS
    this.speaking = 0;
    this.rest = 0;
  }

  show(frame) {
    if (!frame.map) return;
    const used = this.map.show(frame.map);
    const places = { ...frame.places, used };
    for (const [place, count] of Object.entries(places)) put(`[data-place="${place}"]`, count, String(count));
    this.showMoved(frame.experts);
    this.showRates(this.streams.show(frame, performance.now()));
    clearTimeout(this.rest);
    this.rest = setTimeout(() => this.showRates({ compute: 0, copies: 0, rate: 0 }), STALE_MS);
    this.describe(frame, places);
  }

  showMoved(experts) {
    const reasons = experts ? experts.by_reason : {};
    const sizes = Object.entries(reasons).map(([reason, counts]) => [reason, counts.read_bytes]);
    const most = Math.max(1, ...sizes.map(([, size]) => size));
    for (const [reason, size] of sizes) {
      put(`[data-reason="${reason}"]`, size, formatBytes(size));
      document.querySelector(`.bar.${reason}`).style.width = `calc((100% - 6rem) * ${size / most})`;
    }
    byId("needed").textContent = experts && experts.leased
      ? `Needed ${count(experts.leased)} times: ${percent(experts.hits / experts.leased)} there, `
        + `${percent(experts.late / experts.leased)} late, ${percent(experts.misses / experts.leased)} missing.`
      : experts ? "" : "Every expert is in fast memory: nothing has to move.";
  }

  showRates({ compute, copies, rate }) {
    byId("compute").textContent = percent(compute);
    byId("copies").textContent = percent(copies);
    byId("rate").textContent = `${formatBytes(rate)}/s`;
  }

  describe(frame, places) {
    this.untold = { frame, places };
    if (!this.speaking) this.speak();
  }

  /** At once, then no sooner than SPOKEN_MS later: what came last is always told. */
  speak() {
    const { frame, places } = this.untold;
    this.untold = null;
    this.speaking = setTimeout(() => {
      this.speaking = 0;
      if (this.untold) this.speak();
    }, SPOKEN_MS);
    byId("map").setAttribute("aria-label", `${frame.map.length} layers of experts: ${places.fast} in fast memory, `
      + `${places.moving} on their way, ${places.ram} in RAM, ${places.disk} on disk; ${places.used} used by the last step.`);
    byId("streams").setAttribute("aria-label",
      `The last half minute: compute ${byId("compute").textContent}, copies ${byId("copies").textContent} busy.`);
  }
}

function put(selector, value, text) {
  const element = document.querySelector(selector);
  element.value = value;
  element.textContent = text;
}

export const percent = (share) => `${Math.round(100 * share)} %`;

const count = (number) => number.toLocaleString("en");

export function formatBytes(size) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  for (; size >= 1000 && unit < units.length - 1; unit++) size /= 1000;
  return `${size >= 100 || unit === 0 ? Math.round(size) : size.toFixed(1)} ${units[unit]}`;
}
