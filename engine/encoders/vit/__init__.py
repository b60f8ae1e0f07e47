"""The plain vision transformer that many families share (CLIP, SigLIP, InternViT, Pixtral), and its projectors."""
