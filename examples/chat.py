"""Chat with the model in a terminal; answers stream, and the conversation continues. An empty line or Ctrl-D ends it.

python examples/chat.py [--base-url http://localhost:8000/v1]
"""

import argparse

from openai import OpenAI


def line() -> str:
    """The next line of input; an empty text at the end of the input (Ctrl-D)."""
    try:
        return input("> ")
    except EOFError:
        print()
        return ""


def main() -> None:
    """Reads a line and streams an answer, until a line is empty."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", default="http://localhost:8000/v1")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("questions", nargs="*", help="ask these in turn instead of reading lines")
    args = parser.parse_args()
    client = OpenAI(base_url=args.base_url, api_key=args.api_key)
    model = client.models.list().data[0].id
    messages: list = []
    waiting = list(args.questions)
    while True:
        question = waiting.pop(0) if waiting else "" if args.questions else line()
        if not question:
            return
        if args.questions:
            print(f"> {question}")
        messages.append({"role": "user", "content": question})
        answer = ""
        for chunk in client.chat.completions.create(model=model, messages=messages, stream=True, temperature=0):
            text = (chunk.choices[0].delta.content or "") if chunk.choices else ""
            answer += text
            print(text, end="", flush=True)
        print()
        messages.append({"role": "assistant", "content": answer})


if __name__ == "__main__":
    main()
