"""What tests share: fakes of ours, workers, ways of composing and launching."""
