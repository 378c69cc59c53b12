// The heat map: layers down, experts across. A cell's colour is where the expert lies, its dot how lately it was used.

const PLACES = ["disk", "ram", "moving", "fast"];
const USED = 4;
const FADE = 0.4; // of a dot's strength from one frame to the next

export class ExpertMap {
  constructor(canvas) {
    this.canvas = canvas;
    this.rows = [];
    this.heat = [];
    new ResizeObserver(() => this.draw()).observe(canvas.parentElement);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  /** `rows`: one string per layer, one digit per expert: its place, and 4 more if the last step used it. */
  show(rows) {
    const cells = rows.join("");
    if (cells.length !== this.heat.length) this.heat = new Array(cells.length).fill(0);
    this.heat = this.heat.map((heat, i) => (cells[i] >= USED ? 1 : heat < 0.2 ? 0 : heat * FADE));
    this.rows = rows;
    this.draw();
    return [...cells].filter((digit) => digit >= USED).length;
  }

  draw() {
    const { rows, canvas } = this;
    if (!rows.length) return;
    const across = Math.max(...rows.map((row) => row.length));
    const scale = devicePixelRatio || 1;
    const cell = Math.max(1, Math.floor((canvas.parentElement.clientWidth * scale) / across));
    const gap = cell > 3 ? 1 : 0;
    canvas.width = cell * across;
    canvas.height = cell * rows.length;
    canvas.style.width = `${canvas.width / scale}px`;
    canvas.style.height = `${canvas.height / scale}px`;
    canvas.dataset.cell = cell;
    const style = getComputedStyle(canvas);
    const colours = PLACES.map((place) => style.getPropertyValue(`--${place}`));
    const used = style.getPropertyValue("--used");
    const pen = canvas.getContext("2d");
    const inset = Math.max(gap, Math.floor(cell / 4));
    let at = 0;
    rows.forEach((row, y) => [...row].forEach((digit, x) => {
      pen.globalAlpha = 1;
      pen.fillStyle = colours[digit % USED];
      pen.fillRect(x * cell, y * cell, cell - gap, cell - gap);
      const heat = this.heat[at++];
      if (!heat) return;
      pen.globalAlpha = heat;
      pen.fillStyle = used;
      pen.fillRect(x * cell + inset, y * cell + inset, cell - gap - 2 * inset || 1, cell - gap - 2 * inset || 1);
    }));
  }
}
