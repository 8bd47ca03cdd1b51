"""TensorBoard tags, each named once."""

TRAIN_LOSS = "train/loss"
TRAIN_ACCURACY = "train/accuracy"
TRAIN_ACCEPTANCE_LENGTH = "train/acceptance_length"
TRAIN_LR = "train/lr"
LOSS_BY_LENGTH = "loss_by_length"
ACCEPTANCE_BY_LENGTH = "acceptance_by_length"
PADDING_RATIO = "padding/ratio"
PADDING_TOKENS = "padding/tokens"
REAL_TOKENS_PER_S = "throughput/real_tokens_per_s"
PADDED_TOKENS_PER_S = "throughput/padded_tokens_per_s"
ANCHORS_PER_S = "throughput/anchors_per_s"
GRAD_NORM = "grad/norm"
GRAD_SPIKES = "grad/spikes"
GRAD_SPIKE_THRESHOLD = "grad/spike_threshold"
LOSS_SPIKES = "loss/spikes"
PIPELINE_Q_PRE = "pipeline/q_pre"
PIPELINE_Q_HS = "pipeline/q_hs"
PIPELINE_TARGET_WAIT = "pipeline/target_wait"
PIPELINE_DRAFTER_WAIT = "pipeline/drafter_wait"
PIPELINE_TRANSFER = "pipeline/transfer"
ETA2_RATIO = "mixing/eta2_ratio"
DATA_EPOCH = "data/epoch"
VAL_LOSS = "val/loss"
VAL_ACCEPTANCE_LENGTH = "val/acceptance_length"
VAL_LOSS_BY_LENGTH = "val_loss_by_length"
DECODE_ACCEPTANCE_LENGTH = "decode/acceptance_length"
DECODE_SPEEDUP = "decode/speedup"


def length_bucket(length_tokens: int) -> int:
    """Index b of the fixed bucket 2**b <= length < 2**(b + 1), the same whatever the sampler."""
    return length_tokens.bit_length() - 1


def length_range(bucket: int) -> str:
    """The lengths of a bucket, `0128-0255` for bucket 7."""
    return f"{2**bucket:04d}-{2 ** (bucket + 1) - 1:04d}"


def by_length(group: str, bucket: int) -> str:
    """Tag of one length bucket, `loss_by_length/0128-0255` for bucket 7."""
    return f"{group}/{length_range(bucket)}"
