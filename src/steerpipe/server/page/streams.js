// The last half minute of the two streams: compute above, copies below, a column is a tenth of a second.

const COLUMNS = 300;
const COLUMN_SECONDS = 0.1;
const IDLE = { compute: 0, copies: 0, bytes: {} };

export class Streams {
  constructor(canvas) {
    this.canvas = canvas;
    this.columns = [];
    this.last = null;
    this.draw();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  /** Shares of the time since the frame before in which each stream was busy, and bytes moved per second. */
  show(frame, now) {
    const before = this.last;
    const reasons = frame.experts ? frame.experts.by_reason : null;
    const total = (reason) => (reasons ? reasons[reason].read_bytes : 0);
    this.last = {
      now, compute: frame.compute_seconds, copies: frame.copy_seconds,
      bytes: { demand: total("demand"), prefetch: total("prefetch"), draft: total("draft") },
    };
    if (!before || before.compute > this.last.compute || now <= before.now) return { compute: 0, copies: 0, rate: 0 };
    const delta = (name) => Math.max(0, this.last[name] - before[name]);
    const bytes = {};
    for (const reason of Object.keys(this.last.bytes)) bytes[reason] = this.last.bytes[reason] - before.bytes[reason];
    // no frame comes while nothing happens: what happened lies at the end of the time since the frame before
    const columns = Math.max(1, Math.round((now - before.now) / 1000 / COLUMN_SECONDS));
    const needed = Math.ceil(Math.max(delta("compute"), delta("copies")) / COLUMN_SECONDS);
    const busy = Math.min(columns, Math.max(1, needed));
    const share = (name) => Math.min(1, delta(name) / (busy * COLUMN_SECONDS));
    const shown = { compute: share("compute"), copies: share("copies"), bytes };
    for (let i = 0; i < Math.min(columns - busy, COLUMNS); i++) this.columns.push(IDLE);
    for (let i = 0; i < busy; i++) this.columns.push(shown);
    this.columns = this.columns.slice(-COLUMNS);
    this.draw();
    const moved = Object.values(bytes).reduce((sum, each) => sum + each, 0);
    return { ...shown, rate: moved / (busy * COLUMN_SECONDS) };
  }

  draw() {
    const scale = devicePixelRatio || 1;
    const { canvas } = this;
    const width = (canvas.width = Math.round(canvas.parentElement.clientWidth * scale));
    const height = (canvas.height = Math.round(64 * scale));
    canvas.style.height = "64px";
    const style = getComputedStyle(canvas);
    const pen = canvas.getContext("2d");
    const half = height / 2 - scale;
    const step = width / COLUMNS;
    pen.fillStyle = style.getPropertyValue("--disk");
    pen.fillRect(0, 0, width, half);
    pen.fillRect(0, half + 2 * scale, width, half);
    this.columns.forEach((column, i) => {
      const x = width - (this.columns.length - i) * step;
      pen.fillStyle = style.getPropertyValue("--compute");
      pen.fillRect(x, half * (1 - column.compute), step + 0.5, half * column.compute);
      const total = Object.values(column.bytes).reduce((sum, each) => sum + each, 0);
      let base = height;
      for (const [reason, bytes] of Object.entries(column.bytes)) {
        const tall = total ? half * column.copies * (bytes / total) : 0;
        pen.fillStyle = style.getPropertyValue(`--${reason}`);
        pen.fillRect(x, base - tall, step + 0.5, tall);
        base -= tall;
      }
    });
  }
}
