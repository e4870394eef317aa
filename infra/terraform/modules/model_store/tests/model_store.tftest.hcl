# The plan of a model store. No account is asked: the provider is a mock.

mock_provider "aws" {
  override_during = plan

  mock_data "aws_partition" {
    defaults = { partition = "aws" }
  }

  mock_data "aws_caller_identity" {
    defaults = { account_id = "123456789012" }
  }

  mock_resource "aws_kms_key" {
    defaults = { arn = "arn:aws:kms:us-east-1:123456789012:key/models" }
  }

  mock_resource "aws_s3_bucket" {
    defaults = { id = "acme-models" }
  }
}

variables {
  bucket_name = "acme-models"
}

run "nothing_of_it_is_public" {
  command = plan

  assert {
    condition = (
      aws_s3_bucket_public_access_block.models.block_public_acls && aws_s3_bucket_public_access_block.models.block_public_policy &&
      aws_s3_bucket_public_access_block.models.ignore_public_acls && aws_s3_bucket_public_access_block.models.restrict_public_buckets
    )
    error_message = "all four doors are shut"
  }

  assert {
    condition     = alltrue([for statement in jsondecode(aws_s3_bucket_policy.models.policy).Statement : statement.Effect == "Deny"])
    error_message = "the bucket's own policy allows nobody anything"
  }

  assert {
    condition     = aws_s3_bucket_ownership_controls.models.rule[0].object_ownership == "BucketOwnerEnforced"
    error_message = "there are no ACLs"
  }
}

run "encrypted_at_rest_and_on_the_way" {
  command = plan

  assert {
    condition = one([
      for rule in aws_s3_bucket_server_side_encryption_configuration.models.rule :
      rule.apply_server_side_encryption_by_default[0].sse_algorithm == "aws:kms" && rule.bucket_key_enabled
    ])
    error_message = "objects are encrypted with the store's key"
  }

  assert {
    condition     = aws_kms_key.models.enable_key_rotation
    error_message = "the key is rotated"
  }

  assert {
    condition     = jsondecode(aws_s3_bucket_policy.models.policy).Statement[0].Condition.Bool["aws:SecureTransport"] == "false"
    error_message = "without TLS there is no access"
  }
}

run "versions_are_kept_for_a_while" {
  command = plan

  assert {
    condition     = aws_s3_bucket_versioning.models.versioning_configuration[0].status == "Enabled"
    error_message = "a model that was overwritten can be had back"
  }

  assert {
    condition     = aws_s3_bucket_lifecycle_configuration.models.rule[0].noncurrent_version_expiration[0].noncurrent_days == 30
    error_message = "but not for ever"
  }
}

run "access_logs" {
  command = plan
  variables { log_bucket = "acme-logs" }

  assert {
    condition     = aws_s3_bucket_logging.models["on"].target_bucket == "acme-logs"
    error_message = "logs go where they were asked for"
  }
}

run "a_name_that_is_none" {
  command = plan
  variables { bucket_name = "Acme.Models" }
  expect_failures = [var.bucket_name]
}

run "no_days" {
  command = plan
  variables { old_version_days = 0 }
  expect_failures = [var.old_version_days]
}
