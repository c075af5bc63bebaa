"""Operations on a whole stream, on any machine: verify, fold, garbage-collect; and auditing a live
model."""
