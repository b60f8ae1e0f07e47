"""Transcribe a recording: as text that streams, or as subtitles.

python examples/transcribe.py examples/media/digits-118.wav
python examples/transcribe.py talk.mp3 --format srt > talk.srt
"""

import argparse
from pathlib import Path

from openai import OpenAI

MEDIA = Path(__file__).parent / "media"


def main() -> None:
    """Sends one recording and prints its transcription."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path, default=MEDIA / "digits-118.wav")
    parser.add_argument("--format", choices=("stream", "text", "srt", "vtt"), default="stream")
    parser.add_argument("--language", help="such as en or de; without it the model finds out")
    parser.add_argument("--base-url", default="http://localhost:8000/v1")
    parser.add_argument("--api-key", default="none")
    args = parser.parse_args()
    if not args.file.is_file():
        parser.error(f"there is no file {args.file}")
    client = OpenAI(base_url=args.base_url, api_key=args.api_key)
    asked = {"language": args.language} if args.language else {}
    with client, args.file.open("rb") as file:
        model = client.models.list().data[0].id
        if args.format != "stream":
            print(client.audio.transcriptions.create(model=model, file=file, response_format=args.format, **asked))
            return
        for event in client.audio.transcriptions.create(model=model, file=file, stream=True, **asked):
            if event.type == "transcript.text.delta":
                print(event.delta, end="", flush=True)
        print()


if __name__ == "__main__":
    main()
