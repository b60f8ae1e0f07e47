"""MediaLimits: every bound on media, in one frozen value.

Owner: none, built once by the server's configuration and read by loop and pool. Fields are the flags of the command
line with underscores; sizes are bytes, times are seconds. A request may lower a bound, never raise it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from engine.base.request import Modality


@dataclass(frozen=True, slots=True)
class MediaLimits:
    """Defaults are those of a public server on one machine."""

    # URLs
    allowed_media_domains: tuple[str, ...] = ()  # names, *.names, addresses, CIDRs, or "*"; empty: any public host
    media_schemes: tuple[str, ...] = ("http", "https", "data")
    media_ports: tuple[int, ...] = (80, 443)  # any port for a listed host
    media_max_url_bytes: int = 8192  # URLs to fetch; the content's size bounds data: URLs
    media_max_redirects: int = 3
    media_dns_timeout: float = 2.0
    allowed_local_media_path: str | None = None  # folder of file: URLs; None: file: URLs are refused
    # transfer
    limit_mm_per_prompt: Mapping[str, int] = field(default_factory=dict)  # per modality, below media_max_items
    media_max_items: int = 64
    image_max_bytes: int = 20 << 20
    audio_max_bytes: int = 25 << 20
    video_max_bytes: int = 100 << 20
    request_media_bytes: int = 128 << 20
    image_fetch_timeout: float = 5.0
    audio_fetch_timeout: float = 10.0
    video_fetch_timeout: float = 30.0
    media_max_fetches: int = 64
    media_max_fetches_per_host: int = 8
    max_media_waiting: int = 256  # requests that load media at one time
    # images
    image_formats: tuple[str, ...] = ("jpeg", "png", "webp", "gif", "bmp", "tiff", "avif")
    image_max_pixels: int = 48 << 20
    image_max_side: int = 16384
    image_min_side: int = 2
    image_max_aspect: float = 200.0
    # audio
    audio_formats: tuple[str, ...] = ("wav", "mp3", "flac", "ogg", "m4a", "webm")
    audio_max_seconds: float = 600.0
    transcription_max_seconds: float = 7200.0
    audio_min_seconds: float = 0.02
    audio_sample_rates: tuple[int, int] = (8000, 192000)
    audio_max_channels: int = 8
    # video
    video_formats: tuple[str, ...] = ("mp4", "mov", "mkv", "webm", "gif")
    video_codecs: tuple[str, ...] = ("h264", "hevc", "vp8", "vp9", "av1", "gif")
    video_max_seconds: float = 600.0
    video_max_decoded_frames: int = 36000
    video_max_frames: int = 256
    video_max_frame_pixels: int = 4096 * 2176
    video_max_total_pixels: int = 96 << 20  # chosen frames, after scaling
    video_max_streams: int = 8
    # decoding
    image_decode_timeout: float = 10.0
    audio_decode_timeout: float = 30.0
    video_decode_timeout: float = 60.0
    request_decoded_bytes: int = 1 << 30
    decoded_budget_bytes: int = 8 << 30
    media_isolation: Literal["none", "video", "all"] = "none"  # media decoded in separate processes (mm/isolation)
    helper_processes: int = 2
    helper_memory_bytes: int = 4 << 30  # address space of each helper
    mm_processor_cache_gb: float = 4.0

    def max_bytes(self, modality: Modality) -> int:
        """Most encoded bytes of one item."""
        return {"image": self.image_max_bytes, "audio": self.audio_max_bytes, "video": self.video_max_bytes}[modality]

    def formats(self, modality: Modality) -> tuple[str, ...]:
        return {"image": self.image_formats, "audio": self.audio_formats, "video": self.video_formats}[modality]

    def fetch_timeout(self, modality: Modality) -> float:
        return {
            "image": self.image_fetch_timeout,
            "audio": self.audio_fetch_timeout,
            "video": self.video_fetch_timeout,
        }[modality]

    def decode_timeout(self, modality: Modality) -> float:
        return {
            "image": self.image_decode_timeout,
            "audio": self.audio_decode_timeout,
            "video": self.video_decode_timeout,
        }[modality]

    def isolates(self, modality: Modality) -> bool:
        """Whether files of this kind are decoded in separate processes."""
        return self.media_isolation == "all" or (self.media_isolation == "video" and modality == "video")

    def max_items(self, modality: Modality) -> int:
        return min(self.media_max_items, self.limit_mm_per_prompt.get(modality, self.media_max_items))
