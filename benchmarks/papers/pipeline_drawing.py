"""A schedule of nano-operations as a picture (SVG): a lane for each resource, two periods."""

from __future__ import annotations

from html import escape

from motet.benchmarks.papers.pipeline_search import Schedule

_LANES = {"compute": "#e8b84a", "memory": "#6aa56a", "network": "#6f95cf"}
_WIDTH, _LEFT, _LANE, _HEIGHT = 960, 70, 96, 76  # pixels: of all, before the lanes, of a lane, of the whole device
_NUM_PERIODS = 2


def draw(schedule: Schedule) -> str:
    """Boxes are as high as the operation's share of the device. Later nano-batches are darker."""
    scale = (_WIDTH - _LEFT - 10) / (_NUM_PERIODS * schedule.period_ms)
    drawn = []
    for lane, (resource, colour) in enumerate(_LANES.items()):
        floor = lane * _LANE + _HEIGHT + 10
        drawn.append(f'<text x="4" y="{floor - 4}">{resource}</text>')
        drawn.append(f'<path d="M{_LEFT} {floor}H{_WIDTH - 10}" stroke="#888"/>')
        for placed in schedule.placed:
            if placed.operation.work.resource != resource:
                continue
            for layer in range(-2, _NUM_PERIODS):  # it may have begun in a layer before those that are drawn
                start_ms = max(0.0, placed.start_ms + layer * schedule.period_ms)
                end_ms = min(_NUM_PERIODS * schedule.period_ms, placed.end_ms + layer * schedule.period_ms)
                if end_ms <= start_ms:
                    continue
                left, width, height = _LEFT + start_ms * scale, (end_ms - start_ms) * scale, placed.share * _HEIGHT
                opacity = 0.55 + 0.45 * placed.operation.batch / max(1, len(schedule.sizes) - 1)
                drawn.append(
                    f'<rect x="{left:.1f}" y="{floor - height:.1f}" width="{width:.1f}" height="{height:.1f}" '
                    f'fill="{colour}" fill-opacity="{opacity:.2f}" stroke="#333" stroke-width="0.6">'
                    f"<title>{escape(placed.operation.name)}: {placed.share:g} of the device, "
                    f"{placed.duration_ms:.3f} ms</title></rect>"
                )
                if width > 34:
                    label = f"{escape(placed.operation.name)} {placed.share:g}"
                    drawn.append(f'<text x="{left + 3:.1f}" y="{floor - 4}">{label}</text>')
    middle, bottom = _LEFT + schedule.period_ms * scale, len(_LANES) * _LANE + 4
    sizes = " + ".join(map(str, schedule.sizes))
    drawn.append(f'<path d="M{middle:.1f} 6V{bottom}" stroke="#333" stroke-dasharray="4 3"/>')
    drawn.append(
        f'<text x="{_LEFT}" y="{bottom + 14}">{sizes} rows; a layer takes {schedule.period_ms:.3f} ms, to the '
        "dashed line; numbers are shares of the device</text>"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {bottom + 24}" width="{_WIDTH}" '
        f'font-family="sans-serif" font-size="11">{"".join(drawn)}</svg>\n'
    )
