"""Pages that flowdup writes, parsed."""

from html.parser import HTMLParser
from pathlib import Path

VOID = {"meta", "img"}


class Page(HTMLParser):
    """A parsed page: its tags with their attributes, and its text."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.open: list[str] = []
        self.source = path.read_text()
        self.feed(self.source)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data.replace("\xa0", " ") + "\n"

    def of_class(self, name: str) -> list[dict[str, str | None]]:
        return [attrs for _, attrs in self.tags if name in (attrs.get("class") or "").split()]

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)

    def check_alone(self) -> None:
        """That it runs nothing, loads nothing and leads nowhere."""
        assert self.count("script") == self.count("link") == self.count("iframe") == 0
        for _, attrs in self.tags:
            for name, value in attrs.items():
                assert name not in ("href", "xlink:href", "srcset") and not name.startswith("on")
                assert name != "src" or (value or "").startswith("data:image/svg+xml;base64,")
        assert "url(" not in self.source and "@import" not in self.source
