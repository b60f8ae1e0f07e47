"""Ask about one or more pictures.

python examples/vision.py examples/media/star-and-square.png --question "What is in the picture?"
"""

import argparse
import base64
from pathlib import Path

from openai import OpenAI

MEDIA = Path(__file__).parent / "media"


def part(path: Path) -> dict:
    """The file as a message part, in base64."""
    data = base64.b64encode(path.read_bytes()).decode()
    kind = "jpeg" if path.suffix.lower() in (".jpg", ".jpeg") else path.suffix[1:].lower()
    return {"type": "image_url", "image_url": {"url": f"data:image/{kind};base64,{data}"}}


def main() -> None:
    """Asks one question about the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, default=[MEDIA / "red-circle.png"])
    parser.add_argument("--question", default="What is in the picture?")
    parser.add_argument("--base-url", default="http://localhost:8000/v1")
    parser.add_argument("--api-key", default="none")
    args = parser.parse_args()
    if missing := [str(path) for path in args.files if not path.is_file()]:
        parser.error(f"there is no file {', '.join(missing)}")
    client = OpenAI(base_url=args.base_url, api_key=args.api_key)
    content = [*(part(path) for path in args.files), {"type": "text", "text": args.question}]
    stream = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": content}],
        temperature=0,
        stream=True,
    )
    for chunk in stream:
        print((chunk.choices[0].delta.content or "") if chunk.choices else "", end="", flush=True)
    print()


if __name__ == "__main__":
    main()
