"""Ask about a sound: spoken digits, command words, tones.

python examples/listen.py examples/media/three-beeps.mp3 --question "What do you hear?"
"""

import argparse
import base64
from pathlib import Path

from openai import OpenAI

MEDIA = Path(__file__).parent / "media"


def part(path: Path) -> dict:
    """The file as a message part, in base64."""
    data = base64.b64encode(path.read_bytes()).decode()
    return {"type": "input_audio", "input_audio": {"data": data, "format": path.suffix[1:].lower()}}


def main() -> None:
    """Asks one question about the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, default=[MEDIA / "digits-118.wav"])
    parser.add_argument("--question", default="What do you hear?")
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
