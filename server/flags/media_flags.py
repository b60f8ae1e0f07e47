"""Flags of media: what `--help` says of the fields of mm's own limits, which are the flags; which values fit together.

Read once, before the loop starts. A field without a line here has no flag.
"""

from __future__ import annotations

import sys

from mm.limits import MediaLimits

MEDIA_HELP = {
    "allowed_media_domains": "hosts, *.names, addresses or CIDRs that media may come from; none: any public host",
    "media_schemes": "schemes of media URLs",
    "media_ports": "ports of media URLs; any for a listed host",
    "media_max_url_bytes": "length of a media URL",
    "media_max_redirects": "redirects of a media URL",
    "media_dns_timeout": "seconds to resolve a media host",
    "allowed_local_media_path": "folder that file: URLs may name; none: no file: URLs",
    "limit_mm_per_prompt": "items per modality, as image=2,video=0; a tower for none of them is not built",
    "media_max_items": "items in all",
    "image_max_bytes": "an encoded picture",
    "audio_max_bytes": "an encoded sound",
    "video_max_bytes": "an encoded film",
    "request_media_bytes": "all encoded media of a request",
    "image_fetch_timeout": "seconds to fetch a picture",
    "audio_fetch_timeout": "seconds to fetch a sound",
    "video_fetch_timeout": "seconds to fetch a film",
    "media_max_fetches": "fetches at one time",
    "media_max_fetches_per_host": "fetches at one time from one host",
    "max_media_waiting": "requests that load media at one time; 429 beyond",
    "image_formats": "files that are read as pictures",
    "image_max_pixels": "pixels of a picture",
    "image_max_side": "longest side of a picture",
    "image_min_side": "shortest side of a picture, and of a film's frames",
    "image_max_aspect": "how many times the long side of a picture or a frame has its short one, below",
    "audio_formats": "files that are read as sound",
    "audio_sample_rates": "LOW-HIGH: samples per second of a sound",
    "audio_max_channels": "channels of a sound",
    "audio_min_seconds": "shortest sound",
    "audio_max_seconds": "length of a sound in a prompt",
    "transcription_max_seconds": "length of a recording to transcribe",
    "video_formats": "files that are read as films",
    "video_codecs": "codecs of films",
    "video_max_seconds": "length of a film",
    "video_max_decoded_frames": "frames of a whole film",
    "video_max_frames": "frames kept of a film",
    "video_max_frame_pixels": "pixels of a film's frame, before it is scaled",
    "video_max_total_pixels": "pixels of all kept frames, after scaling",
    "video_max_streams": "tracks in a film's file",
    "image_decode_timeout": "seconds to decode a picture",
    "audio_decode_timeout": "seconds to decode a sound",
    "video_decode_timeout": "seconds to decode a film",
    "request_decoded_bytes": "decoded media of a request",
    "decoded_budget_bytes": "decoded media in all",
    "mm_processor_cache_gb": "processed media kept for reuse",
    "media_isolation": "what is decoded in processes of its own: a fault in a decoder ends one request there",
    "helper_processes": "such processes, started when the first file needs them",
    "helper_memory_bytes": "address space of each",
}
LISTS = ("image_formats", "audio_formats", "video_formats", "video_codecs")  # of the words that are their defaults
SPANS = ("audio_sample_rates",)  # LOW-HIGH
LEAST: dict[str, float] = {  # 0 of all others
    "image_min_side": 1,
    "image_max_aspect": 1,
    "audio_sample_rates": 1,
    "audio_max_channels": 1,
    "video_max_streams": 1,
    "helper_processes": 1,
    "helper_memory_bytes": 512 << 20,
}


def check_media(limits: MediaLimits) -> None:
    """What single values cannot show; ValueError names the flag."""
    for name in LISTS:
        chosen, known = getattr(limits, name), getattr(MediaLimits(), name)
        wrong = [word for word in chosen if word not in known]
        if wrong or not chosen:
            got = wrong[0] if wrong else "is empty"
            raise ValueError(f"--{name.replace('_', '-')} {got}: must be some of {', '.join(known)}")
    for name in SPANS:
        span = getattr(limits, name)
        if len(span) != 2 or span[0] > span[1]:
            got = "-".join(map(str, span))
            raise ValueError(f"--{name.replace('_', '-')} {got}: must be LOW-HIGH, such as 8000-48000")
    if limits.media_isolation != "none" and not sys.platform.startswith("linux"):
        raise ValueError(
            f"--media-isolation {limits.media_isolation}: helpers need Linux, this is {sys.platform}; leave it at none"
        )
