"""The physical map: its forms, each of its rules, and what the benchmark measures."""

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from btrfs_ublk.physmap import ContiguousRun, MappingError, MapRow, PhysicalMap, rules
from btrfs_ublk.physmap.rows import BINARY_MAGIC, parse_rows
from btrfs_ublk.units import GIB, MIB

BLOCK = 4096
BASE = 512 * GIB


def row(file_offset: int, size: int, where: int, **changes: object) -> MapRow:
    plain = MapRow(file_offset, size, 0, "regular", size, where, size, 1, where)
    return plain._replace(**changes)


def good_rows() -> list[MapRow]:
    """Two whole extents, one that two file extents share, and one behind a gap."""
    shared = {"logical_size": 4 * MIB, "physical_size": 4 * MIB}
    return [
        row(0, MIB, BASE),
        row(MIB, MIB, BASE + MIB),
        row(2 * MIB, 3 * MIB, BASE + 2 * MIB, **shared),
        row(5 * MIB, MIB, BASE + 2 * MIB, extent_offset=3 * MIB, **shared),
        row(6 * MIB, MIB, BASE + 100 * MIB),
    ]


def plain_rows() -> list[MapRow]:
    return [row(i * MIB, MIB, BASE + i * MIB) for i in range(5)]


def mapped(rows: Sequence[MapRow]) -> PhysicalMap:
    return PhysicalMap(rows)


Check = Callable[[PhysicalMap], object]

#: The row (from 0) to change, how, the rule that it then breaks, and its assertion.
VIOLATIONS: list[tuple[int, dict[str, object], str, Check]] = [
    (1, {"extent_type": kind}, "all regular", rules.all_regular)
    for kind in (
        *("prealloc", "inline", "hole", "regular,compression=zstd"),
        *("regular,encryption=1", "regular,other_encoding=1", "type=9"),
    )
]
VIOLATIONS += [
    (2, {"devid": 2}, "single device", rules.single_device),
    (2, {"devid": None}, "single device", rules.single_device),
    (3, {"physical_size": 2 * MIB}, "one piece", rules.one_piece),
    (3, {"physical_size": None}, "one piece", rules.one_piece),
    (0, {"file_offset": BLOCK}, "one run", rules.one_run),
    (1, {"file_offset": MIB + BLOCK}, "one run", rules.one_run),
    (2, {"file_offset": MIB}, "one run", rules.one_run),
    (2, {"file_size": 0}, "one run", rules.one_run),
    (1, {"file_offset": 0}, "rising", rules.rising),
    (1, {"logical_offset": BASE}, "rising", rules.rising),
    (1, {"logical_offset": BASE + BLOCK}, "rising", rules.rising),
    (1, {"physical_offset": BASE + BLOCK}, "rising", rules.rising),
    (4, {"physical_offset": 0}, "rising", rules.rising),
    (1, {"extent_offset": BLOCK}, "exact cover", rules.exact_cover),
    (1, {"logical_size": 2 * MIB}, "exact cover", rules.exact_cover),
    (1, {"logical_size": BLOCK}, "exact cover", rules.exact_cover),
]
VIOLATIONS += [
    (1, {name: 512}, "aligned", rules.aligned)
    for name in (
        *("file_offset", "file_size", "extent_offset", "logical_size"),
        *("logical_offset", "physical_size", "physical_offset"),
    )
]


@pytest.mark.parametrize("rows", [good_rows, plain_rows])
@pytest.mark.parametrize("index, changes, rule, check", VIOLATIONS)
def test_each_violation_names_its_row_and_rule(
    rows: Callable[[], list[MapRow]],
    index: int,
    changes: dict[str, object],
    rule: str,
    check: Check,
) -> None:
    wrong = rows()
    wrong[index] = wrong[index]._replace(**changes)
    with pytest.raises(MappingError) as caught:
        check(mapped(wrong))
    error = caught.value
    assert (error.rule, error.row_number, error.row) == (rule, index + 1, wrong[index])
    assert f"row {index + 1} breaks the rule {rule!r}" in str(error)
    for name, value in changes.items():
        assert f"{name.replace('_', ' ').upper()} {value}" in str(error)
    with pytest.raises(MappingError):
        mapped(wrong).assert_plain()


def test_shared_extents_must_be_covered_once_and_in_order() -> None:
    def number(rows: list[MapRow]) -> int | None:
        with pytest.raises(MappingError) as caught:
            rules.exact_cover(mapped(rows))
        assert caught.value.rule == "exact cover"
        return caught.value.row_number

    rows = good_rows()
    assert number(rows[:3]) == 3  # its end is missing
    assert number([*rows[:2], rows[3]]) == 3  # its beginning is missing
    assert number([*rows[:2], rows[3], rows[2]]) == 3
    assert number([*rows[:4], *rows[2:]]) == 5  # covered twice
    assert number([rows[0], rows[0]]) == 2
    assert number([*rows[:3], rows[3]._replace(file_size=2 * MIB)]) == 4


def test_numbers_at_the_limit_do_not_run_over() -> None:
    """Offsets that do not fit into 63 bits are compared row by row."""
    top = 1 << 63
    low = row(0, BLOCK, BASE)
    for high in (
        row(BLOCK, top, BASE + BLOCK),
        row(BLOCK, BLOCK, top),
        row(BLOCK, BLOCK, 2 * top - BLOCK),
    ):
        mapped([low, high]).assert_plain()
        for rule in (rules.one_run, rules.rising):
            with pytest.raises(MappingError):
                rule(mapped([high, low]))


@st.composite
def layouts(draw: st.DrawFn) -> list[MapRow]:
    """Extents that follow each other in the file, with gaps on the device."""
    rows, position, where = [], 0, draw(st.integers(0, 1 << 40)) * BLOCK
    for size, gap in draw(
        st.lists(
            st.tuples(st.integers(1, 1 << 20), st.sampled_from([0, 0, 0, 1, 70])),
            min_size=1,
            max_size=12,
        )
    ):
        where += gap * BLOCK
        rows.append(row(position, size * BLOCK, where))
        position += size * BLOCK
        where += size * BLOCK
    return rows


def longest_by_definition(rows: list[MapRow]) -> ContiguousRun:
    runs: list[list[int]] = []
    for line in rows:
        assert line.physical_offset is not None
        if runs and line.physical_offset == runs[-1][1] + runs[-1][2]:
            runs[-1][2] += line.file_size
        else:
            runs.append([line.file_offset, line.physical_offset, line.file_size])
    return ContiguousRun(*max(runs, key=lambda run: run[2]))


@given(layouts())
def test_the_largest_run_is_found(rows: list[MapRow]) -> None:
    mapped(rows).assert_plain()
    expected = longest_by_definition(rows)
    assert mapped(rows).largest_contiguous_run() == expected
    # The same by the general way: a hole at the end makes the map less than plain.
    end = rows[-1].file_offset + rows[-1].file_size
    hole = MapRow(end, BLOCK, 0, "hole", None, None, None, None, None)
    assert mapped([*rows, hole]).largest_contiguous_run() == expected


@given(layouts(), st.data())
def test_a_moved_extent_is_always_noticed(
    rows: list[MapRow], data: st.DataObject
) -> None:
    """Quick comparison of columns and slow search of rows agree."""
    index = data.draw(st.integers(0, len(rows) - 1))
    name = data.draw(st.sampled_from(["file_offset", "logical_offset", "file_size"]))
    delta = data.draw(st.sampled_from([-1, 1])) * BLOCK
    value = getattr(rows[index], name) + delta
    if value < 0:
        return
    wrong = list(rows)
    wrong[index] = rows[index]._replace(**{name: value})
    ends = [(x.logical_offset or 0) + (x.logical_size or 0) for x in wrong]
    rises = all(
        end <= (following.logical_offset or 0)
        for end, following in zip(ends, wrong[1:], strict=False)
    )
    if name == "logical_offset" and rises:
        mapped(wrong).assert_plain()
        return
    with pytest.raises(MappingError) as caught:
        mapped(wrong).assert_plain()
    assert caught.value.row_number in (index + 1, index + 2)


@given(layouts())
def test_rows_are_as_given(rows: list[MapRow]) -> None:
    rows = [*rows, MapRow(1 << 50, BLOCK, 0, "hole", None, None, None, None, None)]
    assert list(mapped(rows)) == rows
    assert mapped(rows)[-1] == rows[-1] and list(mapped(rows)[1:]) == rows[1:]


def test_other_binary_data_is_refused() -> None:
    assert list(parse_rows(BINARY_MAGIC)) == []
    with pytest.raises(MappingError, match="not the binary output"):
        list(parse_rows(b"buphys2\n"))
    with pytest.raises(MappingError, match="only a part"):
        list(parse_rows(BINARY_MAGIC + bytes(71)))
