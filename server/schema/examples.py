"""Examples of requests and answers for /openapi.json, by operationId.

A test sends each request to a server and decodes the example's answer with the type of its route.
"""

from __future__ import annotations

from typing import Any

SUM = [{"role": "user", "content": "What is 12 + 30?"}]
USAGE = {
    "prompt_tokens": 20,
    "completion_tokens": 3,
    "total_tokens": 23,
    "prompt_tokens_details": {"cached_tokens": 0, "multimodal_tokens": None},
    "completion_tokens_details": {"reasoning_tokens": 0},
}
POOLING_USAGE = {"prompt_tokens": 8, "total_tokens": 8}
MODEL = {"created": 1790000000, "model": "omniloop"}

REQUESTS: dict[str, dict[str, Any]] = {
    "create_chat_completion": {"messages": SUM, "max_tokens": 16},
    "create_completion": {"prompt": "1 2 3", "max_tokens": 4},
    "create_message": {"messages": SUM, "max_tokens": 16},
    "count_message_tokens": {"messages": SUM},
    "create_response": {"input": "What is 12 + 30?", "max_output_tokens": 16},
    "count_response_tokens": {"input": "What is 12 + 30?"},
    "generate": {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 4}},
    "render_chat_completion": {"messages": SUM},
    "render_completion": {"prompt": "1 2 3"},
    "tokenize": {"prompt": "Hello"},
    "detokenize": {"tokens": [1, 2, 3]},
    "create_batch": {"input_file_id": "file-5f0c", "endpoint": "/v1/chat/completions", "completion_window": "24h"},
    "abort_requests": {"request_ids": ["chatcmpl-1"]},
    "create_embedding": {"input": ["The film was good.", "The film was bad."]},
    "pool": {"input": "The film was good."},
    "classify": {"input": "The film was good."},
    "score": {"text_1": "What is a cat?", "text_2": ["A cat is an animal.", "It rains."]},
    "create_systemone": {
        "state": "Where is my parcel?",
        "questions": {
            "kind": {"type": "choice", "instructions": "What is it about?", "criteria": {"parcel": None, "bill": None}}
        },
    },
    "create_decision": {
        "input": "Where is my parcel?",
        "questions": [
            {"type": "score", "instructions": "How urgent is it?", "levels": [{"label": "low"}, {"label": "high"}]}
        ],
    },
    "rerank": {"query": "What is a cat?", "documents": ["A cat is an animal.", "It rains."], "top_n": 1},
}
REQUESTS |= {
    "ollama_chat": {"messages": SUM, "stream": False},
    "ollama_generate": {"prompt": "What is 12 + 30?", "stream": False},
    "ollama_embed": {"input": ["The film was good.", "The film was bad."]},
    "ollama_embeddings": {"prompt": "The film was good."},
    "llama_completion": {"prompt": "1 2 3", "n_predict": 4},
    "llama_completions": {"prompt": "1 2 3", "n_predict": 4},
    "llama_apply_template": {"messages": SUM},
    "llama_embedding": {"content": "The film was good."},
    "sglang_generate": {"text": "1 2 3", "sampling_params": {"max_new_tokens": 4}},
    "sglang_abort": {"rid": "a1"},
    "llama_chat": REQUESTS["create_chat_completion"],
    "llama_embeddings": REQUESTS["create_embedding"],
    "llama_reranking": REQUESTS["rerank"],
    "llama_reranking_v1": REQUESTS["rerank"],
    "llama_infill": {"input_prefix": "def f(a):\n    ", "input_suffix": "\n", "n_predict": 16},
    "ollama_show": {"model": "omniloop"},
    "tei_embed": {"inputs": ["The film was good.", "The film was bad."]},
    "tei_embed_all": {"inputs": "The film was good."},
    "tei_embed_sparse": {"inputs": "The film was good."},
    "tei_predict": {"inputs": "The film was good."},
    "cohere_embed": {"texts": ["The film was good."], "input_type": "search_document", "embedding_types": ["float"]},
    "invoke": {"input": "What is 12 + 30?"},
}
REQUESTS |= {"score_v1": REQUESTS["score"], "rerank_v1": REQUESTS["rerank"], "rerank_v2": REQUESTS["rerank"]}

SCORES = {
    "id": "score-5f0c",
    **MODEL,
    "object": "list",
    "data": [{"index": 0, "object": "score", "score": 0.87}, {"index": 1, "object": "score", "score": 0.02}],
    "usage": POOLING_USAGE,
}
RANKS = {
    "id": "rerank-5f0c",
    **MODEL,
    "results": [{"index": 0, "document": {"text": "A cat is an animal."}, "relevance_score": 0.87}],
    "usage": POOLING_USAGE,
}
COHERE_META = {"api_version": {"version": "2"}, "billed_units": {"input_tokens": 8}}
ANSWERS: dict[str, Any] = {
    "tei_embed": [[0.1, -0.2]],
    "tei_embed_all": [[[0.1, -0.2], [0.3, 0.4]]],
    "tei_embed_sparse": [[{"index": 1012, "value": 1.5}]],
    "tei_predict": [{"score": 0.9, "label": "positive"}, {"score": 0.1, "label": "negative"}],
    "cohere_embed": {
        "id": "embd-5f0c",
        "response_type": "embeddings_by_type",
        "embeddings": {"float": [[0.1, -0.2]]},
        "texts": ["The film was good."],
        "meta": COHERE_META,
    },
    "create_chat_completion": {
        "id": "chatcmpl-5f0c",
        "object": "chat.completion",
        **MODEL,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "42", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": USAGE,
        "system_fingerprint": None,
        "service_tier": None,
        "prompt_logprobs": None,
    },
    "create_completion": {
        "id": "cmpl-5f0c",
        "object": "text_completion",
        **MODEL,
        "choices": [
            {
                "index": 0,
                "text": " 4 5",
                "logprobs": None,
                "finish_reason": "length",
                "stop_reason": None,
                "prompt_logprobs": None,
            }
        ],
        "usage": USAGE,
        "system_fingerprint": None,
    },
    "create_message": {
        "id": "msg_5f0c",
        "type": "message",
        "role": "assistant",
        "model": "omniloop",
        "content": [{"type": "text", "text": "42"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 20,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 3,
        },
    },
    "create_response": {
        "id": "resp_5f0c",
        "object": "response",
        "created_at": 1790000000,
        "background": False,
        "instructions": None,
        "max_output_tokens": 16,
        "metadata": {},
        "model": "omniloop",
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "prompt_cache_key": None,
        "reasoning": {"effort": None, "summary": None},
        "service_tier": None,
        "store": True,
        "temperature": 0.0,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "top_p": 1.0,
        "truncation": "disabled",
        "user": None,
        "status": "completed",
        "error": None,
        "incomplete_details": None,
        "output": [
            {
                "id": "msg_5f0c",
                "type": "message",
                "status": "completed",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "42", "annotations": [], "logprobs": []}],
            }
        ],
        "usage": {
            "input_tokens": 20,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": 3,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 23,
        },
    },
    "generate": {
        "request_id": "5f0c",
        "choices": [
            {"index": 0, "token_ids": [4, 5], "finish_reason": "length", "stop_reason": None, "logprobs": None}
        ],
        "usage": USAGE,
        "prompt_logprobs": None,
    },
    "create_transcription": {"text": "Hello.", "usage": {"type": "duration", "seconds": 2}},
    "create_translation": {"text": "Hello.", "usage": {"type": "duration", "seconds": 2}},
    "create_embedding": {
        "id": "embd-5f0c",
        "object": "list",
        **MODEL,
        "data": [{"index": 0, "object": "embedding", "embedding": [0.1, -0.2]}],
        "usage": POOLING_USAGE,
    },
    "pool": {
        "id": "pool-5f0c",
        "object": "list",
        **MODEL,
        "data": [{"index": 0, "object": "pooling", "data": [0.1, -0.2]}],
        "usage": POOLING_USAGE,
    },
    "classify": {
        "id": "classify-5f0c",
        "object": "list",
        **MODEL,
        "data": [{"index": 0, "label": "positive", "probs": [0.1, 0.9], "num_classes": 2}],
        "usage": POOLING_USAGE,
    },
    "create_systemone": {
        "model": "omniloop",
        "answers": {
            "kind": {
                "type": "choice",
                "choice": "parcel",
                "probabilities": {"parcel": 0.9, "bill": 0.1},
                "confidence": 0.8,
            }
        },
        "usage": {"input_tokens": 60, "output_tokens": 0},
    },
    "create_decision": {
        "model": "omniloop",
        "answers": [
            {
                "type": "score",
                "name": None,
                "score": 0.75,
                "confidence": 0.5,
                "probabilities": [
                    {"value": 0, "label": "low", "probability": 0.25},
                    {"value": 1, "label": "high", "probability": 0.75},
                ],
            }
        ],
        "usage": {
            "input_tokens": 60,
            "output_tokens": 0,
            "total_tokens": 60,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 60},
            "output_tokens_details": {"reasoning_tokens": 0},
        },
    },
    "score": SCORES,
    "score_v1": SCORES,
    "rerank": RANKS,
    "rerank_v1": RANKS,
    "rerank_v2": RANKS,
}
