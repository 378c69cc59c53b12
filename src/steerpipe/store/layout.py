"""Where the parts of one expert lie inside its block: pure arithmetic, no tensors.

A block is gate_up, its scales, down, its scales: what is computed first lies first, because a prefetch is a prefix of
a block. gate_up is one matrix, gate rows then up rows. Parts start at multiples of 64 bytes, blocks are multiples of
4 KiB (one page: the unit of direct reads). Legend: H hidden, I expert width.
"""

from dataclasses import dataclass

from steerpipe.core.blocks import BlockForm
from steerpipe.core.errors import PackError
from steerpipe.store.formats import ExpertFormat

PAGE_BYTES = 4096
PART_ALIGNMENT_BYTES = 64
LARGEST_GROUP, SMALLEST_GROUP = 64, 8
_FLOAT_BYTES = {ExpertFormat.FLOAT32: 4, ExpertFormat.BFLOAT16: 2, ExpertFormat.FLOAT16: 2}
_SCALE_BYTES = 2  # float16: times an int8 or int4 it is exact in float32


@dataclass(frozen=True, slots=True)
class Part:
    """One matrix of a block. `dtype` is a torch name, or `int4`: two to a byte."""

    name: str
    dtype: str
    rows: int
    columns: int
    offset: int  # from the start of the block
    size_bytes: int


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """The form of every expert of one size class."""

    format: ExpertFormat
    hidden: int
    width: int
    gate_up_group: int  # inputs that share a scale; 0 where there are no scales
    down_group: int
    parts: tuple[Part, ...]
    block_bytes: int

    def part(self, name: str) -> Part:
        return next(part for part in self.parts if part.name == name)

    @property
    def weights(self) -> int:
        """Numbers of one expert, scales not counted."""
        return 3 * self.hidden * self.width

    @property
    def form(self) -> BlockForm:
        """What a kernel has to know of it."""
        begins = {part.name: part.offset for part in self.parts}
        return BlockForm(
            format=self.format.value,
            hidden=self.hidden,
            width=self.width,
            gate_up=begins["gate_up"],
            down=begins["down"],
            gate_up_scale=begins.get("gate_up.scale", 0),
            down_scale=begins.get("down.scale", 0),
            gate_up_group=self.gate_up_group,
            down_group=self.down_group,
        )


def plan_block(form: ExpertFormat, hidden: int, width: int, group: int | None = None) -> BlockLayout:
    """The layout of a size class. `group` is for int4; None takes the finest that costs no further page."""
    if form is not ExpertFormat.INT4:
        if group is not None:
            raise PackError(f"a group of {group} was asked for with {form.value}", fix="groups belong to int4 alone")
        groups = (hidden, width) if form is ExpertFormat.INT8 else (0, 0)
        return place_block(form, hidden, width, *groups)
    if group is not None:
        return place_block(form, hidden, width, _checked(group, hidden), _checked(group, width))
    return _refine(place_block(form, hidden, width, default_group(hidden), default_group(width)))


def default_group(columns: int) -> int:
    """The largest power of two up to 64 that divides the width; for odd shapes the largest even divisor up to 64."""
    size = LARGEST_GROUP
    while size >= SMALLEST_GROUP:
        if columns % size == 0:
            return size
        size //= 2
    even = [n for n in range(2, min(columns, LARGEST_GROUP) + 1, 2) if columns % n == 0]
    if not even:
        raise PackError(
            f"int4 puts two weights in a byte, but a width of {columns} is odd", fix="pack this model as int8 or bf16"
        )
    return even[-1]


def _refine(layout: BlockLayout) -> BlockLayout:
    """Halves the coarser group, then the other, as long as the block needs no further page: quality for nothing."""
    gate_up, down = layout.gate_up_group, layout.down_group
    halved = [(gate_up // 2, down), (gate_up, down // 2)]
    if down > gate_up:
        halved.reverse()
    for pair in halved:
        legal = min(pair) >= SMALLEST_GROUP and layout.hidden % pair[0] == 0 and layout.width % pair[1] == 0
        if legal:
            finer = place_block(layout.format, layout.hidden, layout.width, *pair)
            if finer.block_bytes == layout.block_bytes:
                return _refine(finer)
    return layout


def _checked(group: int, columns: int) -> int:
    if group < 2 or group % 2 or columns % group:
        legal = [n for n in range(2, columns + 1, 2) if columns % n == 0]
        raise PackError(
            f"groups of {group} do not divide a width of {columns}",
            fix=f"leave the group out, or choose an even divisor of both widths: {', '.join(map(str, legal[:12]))}",
        )
    return group


def place_block(form: ExpertFormat, hidden: int, width: int, gate_up_group: int, down_group: int) -> BlockLayout:
    """The rule of schema 1: a layout follows from format, shape and groups alone."""
    parts: list[Part] = []
    end = 0
    matrices = (("gate_up", 2 * width, hidden, gate_up_group), ("down", hidden, width, down_group))
    for name, rows, columns, group in matrices:
        bits = 4 if form is ExpertFormat.INT4 else 8 * _FLOAT_BYTES.get(form, 1)
        wanted = [Part(name, form.value, rows, columns, 0, rows * columns * bits // 8)]
        if group:
            wanted.append(
                Part(f"{name}.scale", "float16", rows, columns // group, 0, rows * columns // group * _SCALE_BYTES)
            )
        for part in wanted:
            offset = _round_up(end, PART_ALIGNMENT_BYTES)
            parts.append(Part(part.name, part.dtype, part.rows, part.columns, offset, part.size_bytes))
            end = offset + part.size_bytes
    return BlockLayout(form, hidden, width, gate_up_group, down_group, tuple(parts), _round_up(end, PAGE_BYTES))


def _round_up(count: int, unit: int) -> int:
    return -(-count // unit) * unit
