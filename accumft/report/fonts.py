"""Which names from the data can be drawn in a picture, and with which of the installed fonts."""

from collections.abc import Sequence
from pathlib import Path

from accumft.report.text import printable, shorten

_NAME_COLUMNS = 28

# Families with Chinese glyphs, as Linux distributions, Windows and macOS name them.
_CJK_FAMILIES = (
    "Noto Sans CJK SC",
    "Noto Sans SC",
    "Source Han Sans SC",
    "Source Han Sans CN",
    "Noto Sans CJK JP",
    "WenQuanYi Micro Hei",
    "WenQuanYi Zen Hei",
    "Microsoft YaHei",
    "SimHei",
    "PingFang SC",
    "PingFang HK",
    "Hiragino Sans GB",
    "Heiti SC",
    "Heiti TC",
    "STHeiti",
    "Arial Unicode MS",
    "Droid Sans Fallback",
    "AR PL UMing CN",
    "SimSun",
)


def drawable_names(label_names: Sequence[str]) -> tuple[list[str], list[str], bool]:
    """The names as they can be drawn, the font families that hold their glyphs, and whether ids stand for names."""
    from matplotlib import font_manager, get_data_path

    bundled = font_manager.get_font(str(Path(get_data_path()) / "fonts/ttf/DejaVuSans.ttf"))
    names = [shorten(printable(name), _NAME_COLUMNS) for name in label_names]
    missing = {ord(c) for name in names for c in name} - bundled.get_charmap().keys()
    # Two dollar signs would otherwise begin and end a formula.
    names = [name.replace("$", r"\$") for name in names]
    if not missing:
        return names, ["DejaVu Sans"], False
    installed = {entry.name for entry in font_manager.fontManager.ttflist}
    for family in _CJK_FAMILIES:
        if family not in installed:
            continue
        # The upright, regular one of the family's files, which is what is drawn.
        file = font_manager.findfont(font_manager.FontProperties(family=[family]), fallback_to_default=False)
        if missing <= font_manager.get_font(file).get_charmap().keys():
            return names, ["DejaVu Sans", family], False
    return [str(i) for i in range(len(names))], ["DejaVu Sans"], True
