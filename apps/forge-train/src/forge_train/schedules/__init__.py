"""The arithmetic of learning-rate schedules: functions of the step, without torch."""
