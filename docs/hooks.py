"""The published vectors become files of the site, from the one place where they are kept."""

from pathlib import Path

from mkdocs.structure.files import File, Files

VECTORS = Path(__file__).parents[1] / "tests" / "vectors"


def on_files(files: Files, config) -> Files:
    for path in sorted(VECTORS.glob("*.json")):
        files.append(File.generated(config, f"vectors/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **_) -> str:
    if "<!-- list of vectors -->" not in markdown:
        return markdown
    listed = "\n".join(
        f"* [`{path.stem}`](vectors/{path.name})" for path in sorted(VECTORS.glob("*.json"))
    )
    return markdown.replace("<!-- list of vectors -->", listed)
